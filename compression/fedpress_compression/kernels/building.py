"""Kernels as a shared library, which runs without numba: `prebuilt` loads it.

numba compiles each kernel for the types that `warm_up` calls it with, as always. Around each of
these a function is put that C can call: a place for up to two int64 results, then for every array
its address and its shape, for every other argument the number. It returns 0, or 1 if memory ran
out. `_MEMORY` has what kernels need of numba's runtime: memory for scratch arrays.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core.caching import NullCache
from numba.core.codegen import AOTCPUCodegen
from numba.core.compiler_lock import global_compiler_lock
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.runtime import nrtdynmod
from numba.core.types.containers import UniTuple
from numba.np import arrayobj, numpy_support

from fedpress_compression import kernels
from fedpress_compression.errors import ConfigurationError
from fedpress_compression.kernels import compiled
from fedpress_compression.kernels.prebuilt import LIBRARY, TABLE, dtypes_of, source_digest

_WORD = ir.IntType(64)
_MEMORY = """
; {count, destructor, its argument, address, size, allocator}, as in numba/core/runtime/nrt.h
declare ptr @malloc(i64)
declare void @free(ptr)
define ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %align) {
  %wide = zext i32 %align to i64
  %room = add i64 %size, %wide
  %whole = add i64 %room, 48
  %memory = call ptr @malloc(i64 %whole)
  %none = icmp eq ptr %memory, null
  br i1 %none, label %end, label %fill
fill:
  %start = ptrtoint ptr %memory to i64
  %after = add i64 %start, 48
  %over = add i64 %after, %wide
  %least = sub i64 %over, 1
  %mask = sub i64 0, %wide
  %address = and i64 %least, %mask
  store i64 1, ptr %memory
  %at = getelementptr i8, ptr %memory, i64 24
  store i64 %address, ptr %at
  br label %end
end:
  ret ptr %memory
}
define void @NRT_MemInfo_call_dtor(ptr %memory) {
  call void @free(ptr %memory)
  ret void
}
"""
_RETURNED = {
    types.none: "none",
    types.boolean: "bool",
    types.int64: "int",
    types.uint32: "int",
    UniTuple(types.int64, 2): "pair",
}
_NUMBERS = {types.boolean, types.int64, types.uint32, types.float32, types.float64}
_FROM_C = {"malloc", "free", "memcpy", "memmove", "memset"}
"""The functions that the library may leave to the process which loads it."""


def build(folder: Path) -> None:
    """Write the library and its table to `folder`; raises ConfigurationError without a linker."""
    linker = shutil.which("ld")
    if linker is None:
        raise ConfigurationError("no linker: ld is not on the PATH", hint="install binutils")
    functions = dict(_functions())
    for function in functions.values():
        # What a cache holds has not been compiled with all that it calls.
        function._cache = NullCache()  # type: ignore[attr-defined]
    kernels.warm_up()
    idle = [name for name, function in functions.items() if not function.overloads]
    if idle:
        raise ConfigurationError(f"warm_up() does not call {idle}")
    symbols, machine_code = _compiled(functions)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "kernels.o"
        whole.write_bytes(machine_code)
        into = ["--strip-all", "-o", str(folder / LIBRARY), str(whole)]
        safe = ["-z", "noexecstack", "-z", "relro", "-z", "now"]
        subprocess.run([linker, "-shared", "--gc-sections", *safe, *into], check=True)  # noqa: S603
    table = {"sources": source_digest(), "kernels": symbols}
    (folder / TABLE).write_text(json.dumps(table, indent=1) + "\n")


def _functions() -> Iterator[tuple[str, Dispatcher]]:
    """Every kernel, and every function that kernels call, by name."""
    for module in compiled.MODULES:
        for name, function in sorted(vars(module).items()):
            if isinstance(function, Dispatcher) and function.py_func.__module__ == module.__name__:
                yield f"{module.__name__.rpartition('.')[2]}.{name}", function


def _can_be_called(signature: Any) -> bool:
    """Whether a call from Python has such types: contiguous arrays and some numbers."""
    return signature.return_type in _RETURNED and all(
        kind.layout == "C" if isinstance(kind, types.Array) else kind in _NUMBERS
        for kind in signature.args
    )


@global_compiler_lock  # type: ignore[untyped-decorator]
def _compiled(functions: dict[str, Dispatcher]) -> tuple[dict[str, list[dict[str, Any]]], bytes]:
    """The table of symbols by kernel, and an object file with all of them."""
    context = cpu_target.target_context
    codegen = AOTCPUCodegen("fedpress")
    library = codegen.create_library("kernels")
    memory, _ = nrtdynmod.create_nrt_module(context)
    library.add_ir_module(memory)
    library.add_llvm_module(binding.parse_assembly(_MEMORY))
    doors = library.create_ir_module("doors")
    symbols: dict[str, list[dict[str, Any]]] = {}
    callable_ones = (
        (name, result)
        for name, function in functions.items()
        for result in function.overloads.values()
        if _can_be_called(result.signature)
    )
    for name, result in callable_ones:
        forms = symbols.setdefault(name, [])
        arguments = [_kind(each) for each in result.signature.args]
        if any(dtypes_of(arguments) == dtypes_of(form["arguments"]) for form in forms):
            raise ConfigurationError(
                f"{name} is compiled twice for arrays of {dtypes_of(arguments)}",
                hint="always pass its numbers in the same types",
            )
        symbol = f"{name.replace('.', '_')}_{len(forms)}"
        _add_door(context, doors, symbol, result)
        library.add_linking_library(result.library)
        forms.append(
            {
                "symbol": symbol,
                "arguments": arguments,
                "returns": _RETURNED[result.signature.return_type],
            }
        )
    library.add_ir_module(doors)
    library.finalize()
    exported = {form["symbol"] for forms in symbols.values() for form in forms}
    for function in library.get_defined_functions():
        if function.name not in exported:
            function.linkage = "internal"
    module = library._final_module
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    tuning = binding.create_pipeline_tuning_options()
    passes.run(module, binding.create_pass_builder(codegen._tm, tuning))
    declared = {each.name for each in module.functions if each.is_declaration}
    beyond = {name for name in declared - _FROM_C if not name.startswith("llvm.")}
    if beyond:
        raise ConfigurationError(
            f"kernels call {sorted(beyond)}, which a process without numba does not have",
            hint="write a loop instead of the array method that needs it",
        )
    return symbols, library.emit_native_object()


def _kind(given: Any) -> list[Any]:
    """An argument's dtype and number of axes, None for a number."""
    if isinstance(given, types.Array):
        return [numpy_support.as_dtype(given.dtype).str, given.ndim]
    return [numpy_support.as_dtype(given).str, None]


def _add_door(context: Any, module: ir.Module, symbol: str, result: Any) -> None:
    """The function `symbol` that C can call, as the module's docstring describes it."""
    kinds, returned = result.signature.args, result.signature.return_type
    inner = context.declare_function(module, result.fndesc)
    takes: list[ir.Type] = [_WORD.as_pointer()]
    for kind in kinds:
        if isinstance(kind, types.Array):
            takes += [context.get_data_type(kind.dtype).as_pointer()] + [_WORD] * kind.ndim
        else:
            takes.append(context.get_data_type(kind))
    door = ir.Function(module, ir.FunctionType(ir.IntType(32), takes), symbol)
    builder = ir.IRBuilder(door.append_basic_block())
    place, *words = door.args
    arguments = []
    for kind in kinds:
        if isinstance(kind, types.Array):
            address, shape = words[0], words[1 : 1 + kind.ndim]
            words = words[1 + kind.ndim :]
            arguments.append(_array(context, builder, kind, address, shape))
        else:
            model = context.data_model_manager[kind]
            arguments.append(model.from_data(builder, words.pop(0)))
    status, value = context.call_conv.call_function(builder, inner, returned, kinds, arguments)
    values: list[Any] = []
    if isinstance(returned, UniTuple):
        values = cgutils.unpack_tuple(builder, value, returned.count)
    elif returned is not types.none:
        values = [value]
    for index, each in enumerate(values):
        wide = each if each.type == _WORD else builder.zext(each, _WORD)
        builder.store(wide, builder.gep(place, [_WORD(index)]))
    builder.ret(builder.zext(builder.not_(status.is_ok), ir.IntType(32)))


def _array(context: Any, builder: Any, kind: Any, address: Any, shape: list[Any]) -> Any:
    """numba's value of a contiguous array at `address`."""
    size = context.get_abi_sizeof(context.get_data_type(kind.dtype))
    strides = [_WORD(size)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    array = arrayobj.make_array(kind)(context, builder)
    arrayobj.populate_array(array, address, shape, strides, size, None)
    return array._getvalue()
