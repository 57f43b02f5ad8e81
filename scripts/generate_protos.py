"""Generates shared/gen from protos/: messages, stubs and gRPC code, with imports moved under shared.gen."""

import re
import shutil
import sys
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "shared" / "gen"


def main() -> int:
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{ROOT / 'protos'}", f"-I{well_known}", f"--python_out={OUT}", f"--pyi_out={OUT}"]
    code = protoc.main([*arguments, f"--grpc_python_out={OUT}", *map(str, protos)])
    for path in [*OUT.rglob("*.py"), *OUT.rglob("*.pyi")]:
        path.write_text(re.sub(r"\bfrom sextet\.v1 import", "from shared.gen.sextet.v1 import", path.read_text()))
    for folder in (OUT, *(p for p in OUT.rglob("*") if p.is_dir())):
        (folder / "__init__.py").touch()
    return code


if __name__ == "__main__":
    sys.exit(main())
