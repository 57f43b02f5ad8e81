"""What no file of the product may contain (law 6), found in its syntax tree: whatever turns data into code."""

import ast
from collections.abc import Iterator

PICKLES = {
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "pickletools",
    "code", "codeop",
}  # fmt: skip
EXECUTING = {"eval", "exec", "compile", "__import__"}
UNSAFE_YAML = {
    "load", "load_all", "full_load", "full_load_all", "unsafe_load", "unsafe_load_all", "Loader", "FullLoader",
    "UnsafeLoader",
}  # fmt: skip
# torch pickles whatever these carry.
PICKLED_COLLECTIVES = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
MUST_BE_FALSE = {"trust_remote_code", "allow_pickle", "shell"}
DCP = "torch.distributed.checkpoint"
DCP_READS = {"load", "load_state_dict", "FileSystemReader", "StorageReader", "_load_state_dict_from_keys"}


def forbidden(source: str, name: str = "<string>") -> list[str]:
    """`file:line: what`, for each thing that is not allowed."""
    tree = ast.parse(source, name)
    modules = _modules(tree)
    found = [*_of_nodes(tree, modules), *_unverified_reads(tree, modules)]
    return [f"{name}:{line}: {what}" for line, what in sorted(found)]


def _of_nodes(tree: ast.AST, modules: dict[str, str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, f"import {n.name}") for n in names if n.name.partition(".")[0] in PICKLES)
            case ast.ImportFrom(module=str(module), names=names):
                yield from ((node.lineno, what) for what in _imported_from(module, [n.name for n in names]))
            case ast.Name(id=id, ctx=ast.Load()) if id in EXECUTING:
                yield node.lineno, id
            case ast.Attribute(attr=attr):
                if what := _attribute(modules.get(_dotted(node.value), _dotted(node.value)), attr):
                    yield node.lineno, what
            case ast.Call():
                yield from ((node.lineno, what) for what in _call(node, modules))
            case ast.Dict(keys=keys, values=values):
                pairs = zip(keys, values, strict=True)
                yield from ((node.lineno, f"{k.value}") for k, v in pairs if k and _unsafe_option(_constant(k), v))


def _imported_from(module: str, names: list[str]) -> Iterator[str]:
    if module.partition(".")[0] in PICKLES:
        yield f"from {module} import"
    refused = {"yaml": UNSAFE_YAML, "builtins": EXECUTING, "torch": {"load"}, "os": {"system", "popen"}}.get(module, ())
    yield from (f"from {module} import {name}" for name in names if name in refused or name in PICKLED_COLLECTIVES)


def _attribute(owner: str, attr: str) -> str:
    wrong = (
        (owner == "yaml" and attr in UNSAFE_YAML)
        or (owner == "builtins" and attr in EXECUTING)
        or (owner == "os" and attr in ("system", "popen"))
        or attr in PICKLED_COLLECTIVES
    )
    return f"{owner}.{attr}" if wrong else ""


def _call(node: ast.Call, modules: dict[str, str]) -> Iterator[str]:
    options = {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    name = _dotted(node.func)
    owner, _, method = name.rpartition(".")
    yield from (f"{key}= in {name}()" for key, value in options.items() if _unsafe_option(key, value))
    if modules.get(owner, owner) == "torch" and method == "load" and not _is(options.get("weights_only"), True):
        yield "torch.load without weights_only=True"
    if owner.rpartition(".")[2].startswith("Auto") and method in ("from_pretrained", "from_config"):
        # The default is to ask on the terminal whether code that comes with a model may run.
        if not _is(options.get("trust_remote_code"), False):
            yield f"{name} without trust_remote_code=False"
        if "AutoModel" in owner and method == "from_pretrained" and not _is(options.get("use_safetensors"), True):
            yield f"{name} without use_safetensors=True"
    if name in ("getattr", "setattr") and len(node.args) > 1 and _constant(node.args[1]) in EXECUTING - {"compile"}:
        yield f"getattr of {_constant(node.args[1])}"


def _unsafe_option(key: object, value: ast.expr) -> bool:
    if key == "weights_only":
        return not _is(value, True)
    # In prose tables ("trust_remote_code": "nothing: ...") the value is a text.
    return key in MUST_BE_FALSE and not _is(value, False) and not isinstance(_constant(value), str)


def _unverified_reads(tree: ast.AST, modules: dict[str, str]) -> Iterator[tuple[int, str]]:
    """torch's sharded checkpoints keep `.metadata` as a pickle: only after `verify(...)` in the same function."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            continue
        calls = [node for node in _own(function) if isinstance(node, ast.Call)]
        verified = [call.lineno for call in calls if _dotted(call.func).rpartition(".")[2] == "verify"]
        for call in calls:
            owner, _, method = _dotted(call.func).rpartition(".")
            whole = f"{modules.get(owner, owner)}.{method}" if owner else modules.get(method, method)
            read = whole.startswith(f"{DCP}.") and whole.rpartition(".")[2] in DCP_READS
            if read and not any(line < call.lineno for line in verified):
                yield call.lineno, f"{whole} of a checkpoint whose digests were not verified"


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a function, without those of functions inside it."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from _own(child)


def _modules(tree: ast.AST) -> dict[str, str]:
    """Local name to the full name of what it was imported as."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.AST | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _is(node: ast.AST | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value
