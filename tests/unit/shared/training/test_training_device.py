"""GPUs of ranks and threads, as far as they can be seen without one."""

import threading
from types import SimpleNamespace

import torch

from shared.training import device
from shared.training.device import take_gpu, wait_for_copies
from shared.training.role import compute


async def test_what_a_rank_computes_is_on_its_gpu_in_every_thread(monkeypatch):
    seen = []
    monkeypatch.setattr(device, "_of_rank", None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: seen.append((threading.current_thread(), index)))
    assert await compute(lambda: 1) == 1
    assert seen == [], "one process alone computes where its tensors are"
    take_gpu(3)
    thread = await compute(threading.current_thread)
    assert seen == [(threading.main_thread(), 3), (thread, 3)]
    assert thread is not threading.main_thread()


def test_every_gpu_that_tensors_are_on_is_waited_for(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    on = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", index)) for index in (2, 5, 2)]
    wait_for_copies([*on, torch.ones(1)])
    assert sorted(map(str, seen)) == ["cuda:2", "cuda:5"]
