import subprocess
import sys

FAULTS = """
import resource
from shared.gen.sextet.v1 import batch_pb2
from shared.rpc.memory import keep_freed_memory
{call}
chunk = bytes(1 << 20)
def send():
    return len(batch_pb2.ReadResponse(chunk=chunk).SerializeToString())
for _ in range(5):
    send()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(50):
    send()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(call: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", FAULTS.format(call=call)], capture_output=True, text=True, check=True, timeout=60
    )
    return int(done.stdout)


def test_chunks_stop_costing_page_faults():
    without, kept = page_faults(""), page_faults("assert keep_freed_memory()")
    assert without > 50 * 256, "glibc keeps the memory by itself: keep_freed_memory can go"
    assert kept < 256
