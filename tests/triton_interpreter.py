"""Triton kernels on a machine without a GPU: the interpreter, with the GPU's numbers.

`on_import()` waits for the first import of triton. Where there is no CUDA device it then sets TRITON_INTERPRET=1 and
corrects the interpreter of Triton 3.6 to 3.9, which by itself (3.7) rounds fp32 -> E4M3 wrongly in 43% of all cases,
truncates to bf16, adds bf16 as integers and knows no `dot_scaled`. With a CUDA device and no TRITON_INTERPRET it does
nothing. What is as on the GPU, bit for bit:

    casts           fp32 <-> fp16 bf16 E4M3 E5M2, and between those: to nearest even, NaN -> 0x7fff (16 bits);
                    8 bits also saturate (cvt.rn.satfinite): Inf -> the largest value, NaN -> 0x7f. Also what hurts:
                    E5M2 -> bf16 makes finite numbers of Inf and NaN (go through fp32), E4M3 <-> E5M2 does not compile
    + - * / < ==    of fp32, fp16 and bf16, subnormals included
    minimum ...     NaN gives way to a number (or not: `propagate_nan`), -0 < +0
    fma             one rounding
What is not: exp2, log2, sqrt, rsqrt and `/` of fp32, which the GPU approximates (`tl.div_rn` it does not), the order of
a sum, the bits of an fp32 NaN, `tl.clamp` of NaN, and anything about time. Inline asm and libdevice do not run.

An op costs about 10 us plus its data, however small: large tiles, few programs.
"""

import dataclasses
import functools
import importlib.abc
import importlib.machinery
import math
import os
import sys
from typing import Any

import numpy as np


def on_import() -> None:
    """Have `install` run as soon as triton is there, if its kernels are to be interpreted here."""
    if "triton" in sys.modules:
        if _wanted():
            install()
    elif not any(isinstance(finder, _AfterTriton) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTriton())


class _AfterTriton(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Also called by who only asks whether there is a triton, as torch does while it is imported."""
        if fullname != "triton" or (spec := importlib.machinery.PathFinder.find_spec("triton")) is None:
            return None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_install(module: Any) -> None:
            wanted = _wanted()
            load(module)
            if wanted:
                install()

        spec.loader.exec_module = load_and_install  # type: ignore[method-assign]
        return spec


def _wanted() -> bool:
    if "TRITON_INTERPRET" not in os.environ:
        import torch

        if not torch.cuda.is_available():
            os.environ["TRITON_INTERPRET"] = "1"
    return os.environ.get("TRITON_INTERPRET") == "1"


# name in triton: (mantissa bits, exponent bias, largest finite code)
FP8 = {"fp8e4nv": (3, 7, 0x7E), "fp8e5": (2, 15, 0x7B)}


def _table(name: str, *, special: bool = True) -> np.ndarray:
    """The values of the 256 qdata, fp32; special: those above the largest finite one are Inf and NaN."""
    mantissa, bias, largest = FP8[name]
    code = np.arange(256)
    exponent, fraction = (code & 0x7F) >> mantissa, code & ((1 << mantissa) - 1)
    value = np.ldexp(fraction + np.where(exponent > 0, 1 << mantissa, 0), np.maximum(exponent, 1) - bias - mantissa)
    if special:
        value = np.where((code & 0x7F) > largest, np.where((name == "fp8e5") & (fraction == 0), np.inf, np.nan), value)
    return np.where(code & 0x80, -value, value).astype(np.float32)


TABLES = {name: _table(name) for name in FP8}
E5M2_BY_SHIFT = _table("fp8e5", special=False)


def decode(data: np.ndarray, name: str) -> np.ndarray:
    """Numbers as the interpreter stores them (bf16 as uint16, 8 bits as uint8) -> their values in fp32, exact."""
    if name in TABLES:
        return TABLES[name][data]
    if name == "bf16":
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def encode(values: np.ndarray, name: str) -> np.ndarray:
    """fp32 values -> the nearest numbers of a narrower format, as the interpreter stores them."""
    values = np.asarray(values, dtype=np.float32, order="C")
    if name == "fp16":
        half = values.astype(np.float16)
        half.view(np.uint16)[np.isnan(values)] = 0x7FFF
        return half
    bits = values.view(np.uint32)
    if name == "bf16":
        code = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        code[np.isnan(values)] = 0x7FFF
        return code
    mantissa, bias, largest = FP8[name]
    cut = 23 - mantissa
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + ((1 << (cut - 1)) - 1) + ((magnitude >> cut) & 1)) >> cut
    normal = np.minimum(rounded, largest + ((127 - bias) << mantissa)) - ((127 - bias) << mantissa)
    least = np.float32(2.0 ** (1 - bias))
    small = magnitude < least.view(np.uint32)
    subnormal = np.rint(np.where(small, np.abs(values), 0) * np.float32(2.0 ** (bias - 1 + mantissa)))
    code = np.where(small, subnormal.astype(np.uint32), normal) | ((bits >> 24) & 0x80)
    return np.where(np.isnan(values), 0x7F, code).astype(np.uint8)


def to_odd(exact: np.ndarray) -> np.ndarray:
    """fp64 -> fp32; what does not fit goes to the odd neighbour, so that a second rounding is as good as one."""
    with np.errstate(all="ignore"):
        near = exact.astype(np.float32)
    toward = np.where(exact > near, np.float32(np.inf), np.float32(-np.inf))
    even = (near != exact) & np.isfinite(near) & (near.view(np.uint32) & 1 == 0)
    return np.where(even, np.nextafter(near, toward), near)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of fp32, in fp64 and rounded to odd: rounded to fp32 (by `to_odd` for less) it has one rounding."""
    product, z = x.astype(np.float64) * y, z.astype(np.float64)
    total = product + z
    back = total - product
    error = (product - (total - back)) + (z - back)
    even = (error != 0) & np.isfinite(total) & (total.view(np.int64) & 1 == 0)
    return np.where(even, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def _greater(number: Any) -> Any:
    return lambda a, b: np.where((a == 0) & (b == 0), a + b, number(a, b))  # -0 + +0 is +0


def _less(number: Any) -> Any:
    return lambda a, b: np.where((a == 0) & (b == 0), -(-a - b), number(a, b))


def install() -> None:
    """Correct the interpreter, once."""
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.language.semantic import TritonSemantic
    from triton.runtime import autotuner
    from triton.runtime import interpreter as stock

    builder = stock.InterpreterBuilder
    if getattr(builder, "corrected", False):
        return
    builder.corrected = True
    handle = stock.TensorHandle
    coded = ("bf16", *FP8)  # numpy computes with the bits of these
    narrow = (*coded, "fp16")

    # casts
    truncate = stock._convert_float

    def convert(data: Any, source: Any, to: Any, rounding: Any) -> Any:
        if rounding == ir.ROUNDING_MODE.RTZ:
            return truncate(data, source, to, rounding)
        return cast(None, handle(data, source), to).data

    def cast(self: Any, src: Any, to: Any) -> Any:
        source, to = src.dtype.scalar, to.scalar
        if source.name in FP8 and to.name in FP8:
            raise TypeError(f"a GPU casts {source} to {to} only through another format")
        data = decode(src.data, source.name) if source.name in narrow else src.data
        if source.name == "fp8e5" and to.name == "bf16":
            data = E5M2_BY_SHIFT[src.data]
        if data.dtype.kind in "iu" and to.name in narrow:
            data = to_odd(data.astype(np.float64))
        data = encode(data, to.name) if to.name in narrow else data.astype(stock._get_np_dtype(to))
        return handle(data, to)

    stock._convert_float = convert
    builder.cast_impl = cast
    builder.get_bf16 = lambda self, value: handle(encode(np.array([value]), "bf16"), tl.bfloat16)

    # arithmetic
    def values(h: Any) -> Any:
        return decode(h.data, h.dtype.scalar.name) if h.dtype.scalar.name in coded else h.data

    def elementwise(operation: Any, dtype: Any, *operands: Any) -> Any:
        out = operation(*map(values, operands))
        if out.dtype == np.bool_:
            return handle(out, tl.int1)
        if dtype.name in coded:
            return handle(encode(out, dtype.name), dtype)
        return handle(out.astype(stock._get_np_dtype(dtype), copy=False), dtype)

    def binary(self: Any, a: Any, b: Any, operation: Any) -> Any:
        return elementwise(operation, a.dtype.scalar, a, b)

    def clamp(self: Any, x: Any, low: Any, high: Any, propagate: Any) -> Any:
        larger, smaller = (builder.create_maxnumf, builder.create_minnumf)
        if propagate == ir.PROPAGATE_NAN.ALL:
            larger, smaller = (builder.create_maximumf, builder.create_minimumf)
        return smaller(self, larger(self, x, low), high)

    def fused(self: Any, x: Any, y: Any, z: Any) -> Any:
        wide = {"fp64": lambda a, b, c: a * b + c, "fp32": fma}
        operation = wide.get(z.dtype.scalar.name, lambda a, b, c: to_odd(fma(a, b, c)))
        return elementwise(operation, z.dtype.scalar, x, y, z)

    builder.binary_op = binary
    builder.create_maxnumf = lambda self, a, b: binary(self, a, b, _greater(np.fmax))
    builder.create_minnumf = lambda self, a, b: binary(self, a, b, _less(np.fmin))
    builder.create_maximumf = lambda self, a, b: binary(self, a, b, _greater(np.maximum))
    builder.create_minimumf = lambda self, a, b: binary(self, a, b, _less(np.minimum))
    builder.create_clampf = clamp
    builder.create_fma = fused

    def sum_(self: Any, x: Any) -> Any:
        total = np.sum(values(x.handle), axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(encode(total, x.dtype.name) if x.dtype.name in coded else total, x.dtype)

    stock.ReduceOps.sum = sum_

    # products of matrices: operands are exact in fp32, and so are their products of 8-bit and 16-bit numbers
    def dot(self: Any, a: Any, b: Any, c: Any, *precision: Any) -> Any:
        a, b = values(a).astype(c.data.dtype), values(b).astype(c.data.dtype)
        return handle(np.matmul(a, b) + c.data, c.dtype.scalar)

    def scaled(x: Any, scale: Any) -> Any:
        power = 1.0 if scale is None else np.ldexp(np.float32(1), scale.data.astype(np.int32) - 127)
        power = np.where(scale.data == 255, np.nan, power) if scale is not None else power
        return x if scale is None else x * np.repeat(power, x.shape[-1] // power.shape[-1], axis=-1)

    def dot_scaled(
        self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *rest: Any
    ) -> Any:
        c = rest[-1]  # scales lie along K, which is b's first axis
        product = np.matmul(scaled(values(a), a_scale), scaled(values(b).T, b_scale).T)
        return handle((product + c.data).astype(np.float32), tl.float32)

    builder.create_dot = dot
    if not hasattr(builder, "create_dot_scaled"):
        builder.create_dot_scaled = dot_scaled
        checked = TritonSemantic.dot_scaled

        def with_constants(self: Any, a: Any, a_scale: Any, a_format: Any, b: Any, b_scale: Any, b_format: Any, *rest):
            constant = [f if isinstance(f, tl.constexpr) else tl.constexpr(f) for f in (a_format, b_format)]
            return checked(self, a, a_scale, constant[0], b, b_scale, constant[1], *rest)

        TritonSemantic.dot_scaled = with_constants

    # what an op costs besides its data
    # Triton computes at each operation whether an int overflowed, for an assert that is there only for debugging.
    options = stock.interpreter_builder.options
    stock.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=options.debug)
    # It also makes a type for each tensor, and both check and spell out their shape.
    make_block = tl.block_type.__init__
    blocks: dict[Any, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(size.value if isinstance(size, tl.constexpr) else size for size in shape))
        if key not in blocks:
            make_block(self, element_ty, shape)
            sizes = [tl.constexpr(size) for size in self.shape]
            blocks[key] = self.shape, self.numel, self.name, (tl.constexpr(math.prod(self.shape)), tl.tuple(sizes))
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.extent = blocks[key]

    no_extent = tl.constexpr(1), tl.tuple([])

    def tensor(self: Any, data: Any, dtype: Any) -> None:
        self.handle, self.type, self.dtype = data, dtype, dtype.scalar
        self.numel, self.shape = getattr(dtype, "extent", no_extent)

    tl.block_type.__init__ = block
    tl.tensor.__init__ = tensor

    # And it works out at each operation what two operands become, which their types say.
    check, stretch, unwrap = (
        TritonSemantic.binary_op_type_checking_impl,
        TritonSemantic.broadcast_impl_value,
        tl.core._unwrap_if_constexpr,
    )
    uncast: set[Any] = set()
    stretched: dict[Any, Any] = {}
    constants: dict[Any, Any] = {}
    plain = {tl.tensor, int, float, bool, str, type(None)}

    def broadcast(self: Any, a: Any, b: Any) -> Any:
        key = a.type.name, b.type.name
        if key not in stretched:
            pair = stretch(self, a, b)
            stretched[key] = [None if new is old else new.type for new, old in zip(pair, (a, b))]
            return pair
        return [
            x if to is None else tl.tensor(handle(np.broadcast_to(x.handle.data, to.shape), x.handle.dtype.scalar), to)
            for x, to in zip((a, b), stretched[key])
        ]

    def operands(self: Any, a: Any, b: Any, *flags: Any, **named: Any) -> Any:
        """A Python number becomes a constant like the other operand, made once; tensors may only need one shape."""
        numbers = not isinstance(a, tl.tensor), not isinstance(b, tl.tensor)
        if named or all(numbers):
            return check(self, a, b, *flags, **named)
        if any(numbers):
            number, other = (a, b) if numbers[0] else (b, a)
            key = number, type(number), numbers, other.type.name, flags
            if (constant := constants.get(key)) is not None:
                return (constant, b) if numbers[0] else (a, constant)
            pair = check(self, a, b, *flags)
            if pair[numbers[0]] is other:
                constants[key] = pair[numbers[1]]
            return pair
        key = a.type.name, b.type.name, flags
        if key in uncast:
            return broadcast(self, a, b)
        pair = check(self, a, b, *flags)
        if all(new.dtype == old.dtype for new, old in zip(pair, (a, b))):
            uncast.add(key)
        return pair

    TritonSemantic.binary_op_type_checking_impl, TritonSemantic.broadcast_impl_value = operands, broadcast
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in plain else unwrap(value)

    # launches
    start = autotuner.Autotuner.__init__

    def first_config(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        start(self, fn, arg_names, configs, *args, **kwargs)
        self.configs = self.configs[:1]  # there is nothing to measure, and no driver to measure it

    autotuner.Autotuner.__init__ = first_config
    launch, patch = stock.GridExecutor.__call__, stock._patch_lang
    patched: set[int] = set()  # the language modules that this launch has given the interpreter's functions

    @functools.cache
    def modules_of(fn: Any) -> frozenset[int]:
        return frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)

    def patch_once(fn: Any) -> Any:
        """Device functions come here at every call, tl.max too; looking through the language takes 1 ms."""
        modules = modules_of(fn)
        if modules <= patched:
            return stock._LangPatchScope()
        patched.update(modules)
        scope = patch(fn)
        scope.set_attr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))  # 3.6 wants numpy < 2.4
        return scope

    checks_semantic = tl.core.builtin(lambda: None).__code__

    def interpret(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """`member` of the language with the interpreter's semantic, without looking whether there is one."""
        call = member.__wrapped__ if member.__code__ is checks_semantic else member

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = stock.interpreter_semantic
            return call(*args, **kwargs)

        scope.set_attr(obj, name, interpreted)

    look_up = stock._get_np_dtype
    numpy_types: dict[str, Any] = {}

    def numpy_type(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in numpy_types:
            numpy_types[name] = look_up(dtype)
        return numpy_types[name]

    def start_launch(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        with np.errstate(all="ignore"):
            launch(self, *args, **kwargs)

    stock._get_np_dtype = numpy_type
    stock._patch_lang, stock._patch_attr = patch_once, interpret
    stock.GridExecutor.__call__ = start_launch
