"""Read checkpoints with quantized weights: a folder of safetensors in, MXTensor and BlockFP8 out.

Formats, with the names, dtypes and shapes of their stored tensors; X is the name of a layer or weight:

    format      weight                           scale                                          a value is
    mxfp4       X_blocks u8 (.., N, K/32, 16)    X_scales u8 (.., N, K/32)                      E2M1 * 2^(byte-127)
                X.weight_packed u8 (N, K/2)      X.weight_scale u8 (N, K/32)
                X.weight i8 (N, K/2)             X.scale e8m0 (N, K/32)
    mxfp8       X.weight e4m3 (N, K)             X.weight_scale_inv, X.weight_scale             E4M3 * 2^(byte-127)
                                                 or X.scale, u8 or e8m0 (N, K/32)
    fp8_block   X.weight e4m3 (N, K)             the same names, fp32, bf16, fp16 or e8m0,      E4M3 * scale
                                                 one per block of rows x columns, edges cut
    fp8_row     X.weight e4m3 (N, K)             X.weight_scale (N, 1) or (N,)                  E4M3 * scale
    fp8_tensor  X.weight e4m3 (N, K)             X.weight_scale, one number                     E4M3 * scale
    plain       any tensor of bf16, fp16, fp32, fp64 or integers of 32 or 64 bits, without a scale

A value is the element times the scale, even if the scale's name ends in "_inv".

The format of a weight is decided by the names, dtypes and shapes of its tensors. config.json gives the block size and
the quantization method. Dtypes in config.json are ignored, because `scale_fmt: ue8m0` occurs with scales stored as
fp32, bf16 and e8m0. Other formats raise ValueError: NVFP4, GPTQ and AWQ integers, bitsandbytes, int8, E5M2.

Scales of activations are not read: `X.input_scale` and `X.activation_scale` of a quantized weight X, and `k_scale`,
`v_scale` and `q_scale` of attention. Serving engines use them; GEMMs of mxep compute the scales of activations.

Opening a checkpoint reads only headers (names, dtypes, shapes). `StoredWeight.read` reads a weight's bytes. This module
needs safetensors: `pip install mxep-quant[checkpoints]`. docs/guides/quantized-models.md links the definitions of the
layouts.

Letters: N outputs, K inputs. Leading axes, "..", are experts.
"""

import json
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxep.quant.block_fp8 import BlockFP8, BlockShape, exponents_of
from mxep.quant.formats import BLOCK, E2M1
from mxep.quant.tensor import MXTensor

try:
    from safetensors import SafetensorError, safe_open
except ImportError as error:
    raise ImportError("mxep.quant.checkpoint: expected safetensors, got none: pip install safetensors") from error

INDEX = "model.safetensors.index.json"
METHODS = (None, "mxfp4", "mxfp8", "fp8", "modelopt", "compressed-tensors")
"""Values of `quant_method` in config.json that this module accepts."""
PLAIN = ("BF16", "F16", "F32", "F64", "I32", "I64", "BOOL")
E4M3, E8M0 = "F8_E4M3", "F8_E8M0"
SCALE_DTYPES = ("F32", "BF16", "F16", E8M0)
OTHERS = {
    ".qweight": "integers of GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    ".weight_scale_2": "NVFP4 of ModelOpt",
    ".weight_global_scale": "NVFP4 of compressed-tensors",
    ".weight_zero_point": "integers of compressed-tensors",
    ".weight_shape": "packed integers of compressed-tensors",
    "_proj_qdata": "a state of mxep's frozen experts: load_state_dict takes it, save_quantized writes a checkpoint",
}
"""Name endings of tensors in formats that this module cannot read, and what an error says about them."""
OF_INPUTS, OF_ATTENTION = ("input_scale", "activation_scale"), (".k_scale", ".v_scale", ".q_scale")
"""Name endings of scales of activations."""
USUAL_BLOCKS = ((128, 128), (32, 32))


@dataclass(frozen=True)
class Header:
    """Header of a stored tensor: its dtype in safetensors' words, such as "F8_E4M3", its shape, and its file's name."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class StoredWeight:
    """A weight of a checkpoint. Its bytes are read by `read`.

    name: the stored tensor's name without an ending for packed data: "X.weight" for "X.weight_packed".
    format: "mxfp4", "mxfp8", "fp8_block", "fp8_row", "fp8_tensor" or "plain".
    shape: shape in elements; (..., N, K) if quantized.
    tensors: name of the stored tensor and, if quantized, name of its scale tensor.
    block_size: (rows, columns) per scale. None for "plain".
    """

    name: str
    format: str
    shape: tuple[int, ...]
    tensors: tuple[str, ...]
    block_size: BlockShape | None
    checkpoint: "QuantizedCheckpoint" = field(repr=False, compare=False)

    def read(self, part: slice | None = None) -> MXTensor | BlockFP8 | Tensor:
        """Read the weight to the CPU. Returns an MXTensor (mxfp4, mxfp8), a BlockFP8 (fp8_*) or a plain tensor.

        part: read only this slice of the first axis. Allowed for a stacked weight (E, N, K) and for plain tensors; for
            a quantized matrix (N, K) it raises ValueError.
        """
        if part is not None and self.format != "plain" and len(self.shape) < 3:
            raise ValueError(f"{self.name}: expected a stacked weight (E, N, K) to read a part of, got {self.shape}")
        data, *scales = (self.checkpoint.tensor(name, part) for name in self.tensors)
        if self.format == "plain":
            return data
        (scale,) = scales
        if self.format == "mxfp4":
            packed = data.flatten(-2) if self.tensors[0].endswith("blocks") else data
            return MXTensor.from_qdata_and_scales(packed.view(torch.uint8).view(E2M1.dtype), scale)
        if self.format == "mxfp8":
            return MXTensor.from_qdata_and_scales(data, scale)
        assert self.block_size is not None
        grid = (-(-size // block) for size, block in zip(self.shape[-2:], self.block_size))
        return BlockFP8(data, scale.reshape(*data.shape[:-2], *grid), self.block_size)

    def has_exponents(self) -> bool:
        """True if all scales are powers of two, as `mxep.quant.to_mxfp8` needs. False for "plain".

        For fp8_* formats the scales are read from the file to find out.
        """
        if not self.format.startswith("fp8"):
            return self.format != "plain"
        return exponents_of(self.checkpoint.tensor(self.tensors[1])) is not None


class QuantizedCheckpoint:
    """A checkpoint folder with config.json and *.safetensors. If there is an index file, only the files it names.

    Attributes:
        config: contents of config.json, or {} if there is none.
        weights: name -> StoredWeight, in the order of the files.
        activation_scales: names of stored scales of activations, which are not in `weights`.

    Raises ValueError, naming the tensor, for another format, and if a weight and its scale do not fit. Raises
    ValueError if config.json names another quantization method. Raises FileNotFoundError if the folder has no
    safetensors, or lacks a file that the index names. Files stay mapped into memory until `close`, or the end of a
    `with` block.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self.config = _json(self.folder / "config.json")
        method = self._method
        if method not in METHODS:
            raise ValueError(f"{self.folder}: expected quant_method {METHODS[1:]}, got {method!r}")
        self.headers = dict(self._read_headers())
        self.activation_scales: list[str] = []
        self.weights = {weight.name: weight for weight in _weights(self)}

    @property
    def quantization(self) -> str:
        """Method and format as config.json names them, for messages: e.g. "modelopt MXFP8". "" if it names none."""
        words = (self._method, self._declared.get("quant_algo") or self._declared.get("format"))
        return " ".join(str(word) for word in words if word)

    @property
    def block_size(self) -> BlockShape | None:
        """(rows, columns) per scale as config.json gives them, or None.

        Read from `weight_block_size`, or from `block_structure` of compressed-tensors.
        """
        size = self._declared.get("weight_block_size")
        for group in (self._declared.get("config_groups") or {}).values():
            size = size or ((group or {}).get("weights") or {}).get("block_structure")
        if not size:
            return None
        if not isinstance(size, list) or len(size) != 2 or not all(isinstance(n, int) and n > 0 for n in size):
            raise ValueError(f"{self.folder}: expected a block size [rows, columns] in the config, got {size!r}")
        return size[0], size[1]

    def tensor(self, name: str, part: slice | None = None) -> Tensor:
        """Read the stored tensor `name`, or only the slice `part` of its first axis."""
        file = self._file(self.headers[name].file)
        stored: Tensor = file.get_tensor(name) if part is None else file.get_slice(name)[part]
        return stored

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._open.clear()

    def __enter__(self) -> "QuantizedCheckpoint":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @cached_property
    def _declared(self) -> dict[str, Any]:
        of_text = self.config.get("text_config") or {}
        declared = self.config.get("quantization_config") or of_text.get("quantization_config")
        if not declared and (found := _json(self.folder / "hf_quant_config.json").get("quantization")):
            return {"quant_method": "modelopt", **found}
        return declared or {}

    @property
    def _method(self) -> str | None:
        return self._declared.get("quant_method")

    def _file(self, name: str) -> Any:
        if name not in self._open:
            try:
                self._open[name] = safe_open(self.folder / name, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self.folder / name}: expected a safetensors file, got {error}") from error
        return self._open[name]

    def _read_headers(self) -> Iterator[tuple[str, Header]]:
        index: dict[str, str] = _json(self.folder / INDEX).get("weight_map", {})
        files = dict.fromkeys(index.values()) or [path.name for path in sorted(self.folder.glob("*.safetensors"))]
        if not files:
            raise FileNotFoundError(f"{self.folder}: expected a folder with *.safetensors, got none")
        for name in files:
            if not (self.folder / name).is_file():
                raise FileNotFoundError(f"{self.folder / name}: expected this file, which {INDEX} names")
            file = self._file(name)
            keys: list[str] = file.keys()
            for key in keys:
                part = file.get_slice(key)
                yield key, Header(part.get_dtype(), tuple(part.get_shape()), name)
            if lacking := {key for key, where in index.items() if where == name}.difference(keys):
                raise ValueError(f"{self.folder / name}: expected {min(lacking)}, which {INDEX} names, got none")


def _json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file. Returns {} if the file does not exist."""
    if not path.is_file():
        return {}
    try:
        read = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path}: expected a JSON object, got a {type(read).__name__}")
    return read


def _weights(checkpoint: QuantizedCheckpoint) -> Iterator[StoredWeight]:
    """Yield a StoredWeight for each stored tensor that is not a scale. Adds to `activation_scales`."""
    headers = checkpoint.headers
    scales = {weight: name for weight in headers if (name := _scale_of(weight, headers)) is not None}
    taken = set(scales.values())
    for ending, what in OTHERS.items():  # checked first, because the errors below are less specific
        if name := next((name for name in headers if name.endswith(ending)), None):
            raise ValueError(f"{name}: expected a format of mxep.quant.checkpoint, got {what}")
    for name, header in headers.items():
        if name in taken:
            continue
        if name in scales:
            yield _quantized(checkpoint, name, scales[name])
        elif _is_of_activations(name, scales):
            checkpoint.activation_scales.append(name)
        elif header.dtype in PLAIN:
            yield StoredWeight(name, "plain", header.shape, (name,), None, checkpoint)
        else:
            raise ValueError(f"{name}: expected a scale beside {header.dtype} {list(header.shape)}, got none")


def _is_of_activations(name: str, quantized: Collection[str]) -> bool:
    """True if `name` is a scale of activations. quantized: names of the quantized weights."""
    if name.endswith(OF_ATTENTION):
        return bool(quantized)
    stem = next((name.removesuffix(end) for end in OF_INPUTS if name.endswith(end)), None)
    return stem is not None and (f"{stem}weight" in quantized or stem.removesuffix("_") in quantized)


def _scale_of(name: str, headers: dict[str, Header]) -> str | None:
    """Name of the scale tensor of tensor `name`. None if `name` is not quantized."""
    if headers[name].dtype not in ("U8", "I8", E4M3):
        return None
    if name.endswith(("_blocks", ".blocks")):
        names = [f"{name.removesuffix('blocks')}scales"]
    elif name.endswith(".weight_packed"):
        names = [f"{name.removesuffix('_packed')}_scale"]
    else:
        names = [f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}scale"]
    return next((each for each in names if each in headers and each != name), None)


def _quantized(checkpoint: QuantizedCheckpoint, name: str, scale_name: str) -> StoredWeight:
    data, scale = checkpoint.headers[name], checkpoint.headers[scale_name]
    parts = f"{data.dtype} {list(data.shape)} with {scale_name} {scale.dtype} {list(scale.shape)}"

    def stored(kind: str, shape: tuple[int, ...], block: BlockShape, called: str = name) -> StoredWeight:
        return StoredWeight(called, kind, shape, (name, scale_name), block, checkpoint)

    if name.endswith("blocks"):
        *rest, blocks, wide = data.shape
        if data.dtype == scale.dtype == "U8" and wide == BLOCK // 2 and scale.shape == (*rest, blocks):
            return stored("mxfp4", (*rest, blocks * BLOCK), (1, BLOCK), name[: -len("_blocks")])
    elif data.dtype in ("U8", "I8"):
        *rest, wide = data.shape
        if scale.dtype in ("U8", E8M0) and scale.shape == (*rest, 2 * wide // BLOCK) and 2 * wide % BLOCK == 0:
            called = name.removesuffix("_packed")
            return stored("mxfp4", (*rest, 2 * wide), (1, BLOCK), called)
    elif len(data.shape) >= 2:
        *rest, k = data.shape
        if scale.dtype in ("U8", E8M0) and scale.shape == (*rest, k // BLOCK) and k % BLOCK == 0:
            return stored("mxfp8", data.shape, (1, BLOCK))
        if scale.dtype in SCALE_DTYPES and (found := _blocks_of(data.shape, scale.shape, checkpoint.block_size)):
            return stored(found[0], data.shape, found[1])
    raise ValueError(f"{name}: expected parts of a format of mxep.quant.checkpoint, got {parts}")


def _blocks_of(
    shape: tuple[int, ...], scale: tuple[int, ...], declared: BlockShape | None
) -> tuple[str, BlockShape] | None:
    """Find the fp8_* format, and its (rows, columns) per scale, by shapes. declared: those of config.json, or None."""
    *experts, n, k = shape

    def fits(block: BlockShape) -> bool:
        return scale == (*experts, -(-n // block[0]), -(-k // block[1]))

    if declared is not None and declared != (1, BLOCK) and fits(declared):
        return "fp8_block", declared
    if len(scale) < 2 and math.prod(scale) == 1 and not experts:
        return "fp8_tensor", (n, k)
    if scale == (*experts, n, 1) or (scale == (n,) and not experts):
        return "fp8_row", (1, k)
    block = next(filter(fits, USUAL_BLOCKS), None)
    return None if block is None else ("fp8_block", block)
