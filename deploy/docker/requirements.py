"""Prints the requirements that pyproject.toml names, one a line: `requirements.py pyproject.toml [extra ...]`.

Without an extra: the core dependencies. With extras: theirs. So a layer of packages does not depend on the source.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
groups = [project["optional-dependencies"][extra] for extra in sys.argv[2:]] or [project["dependencies"]]
print(*(requirement for group in groups for requirement in group), sep="\n")
