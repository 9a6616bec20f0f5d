"""From a directory, a GGUF file or a catalogue name to a model that is ready to run. Offline for what is here."""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..prompt.errors import ConfigError, ModelUnavailable
from .dtype_choice import fastest_dtype
from .families import FAMILIES
from .model import Decoder
from .native import Library, NativeProducts, Unavailable, checked, move_to_large_pages, native_library
from .quantization import Quantization, quantized_forms
from .spec import ModelSpec, eos_ids, spec_from_config
from .tokenizer import ChatTokenizer
from .weights import SafetensorsSource, load_weights, weight_files

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
SAMPLES, SAMPLE_BYTES = 128, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model in memory. `tokenizer` is None where the directory has none (token ids only).

    `generation_config` is that file of the directory, empty where there is none (a GGUF file has no such thing).
    `fingerprint` names weights, config, dtype and quantization: KV computed under one fingerprint is valid for no
    other. `steps` tells how steps of few rows run: native, or by torch, and why.
    """

    spec: ModelSpec
    decoder: Decoder
    tokenizer: ChatTokenizer | None
    fingerprint: str
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    steps: str = "torch"


def load_model(
    path_or_name: str | Path,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    quantize: Quantization = "none",
    native: bool = True,
) -> LoadedModel:
    """Load a Hugging Face directory, a `.gguf` file, or a name that the catalogue or the hub cache knows.

    `dtype` is float32, bfloat16, float16, auto (float32 on a CPU, bfloat16 on a GPU) or fastest (on a CPU measured once
    a process, elsewhere as auto). `quantize` rounds all matrices: faster, in less memory, not exact. int8 runs on an
    x86 CPU (in float32) and on a GPU, int4 and fp8 on a GPU. `native`: on a CPU steps of few rows, and in
    float32 what others do between their products, go through C++ that is compiled where this has not been done yet,
    which takes some seconds; where it cannot be, torch runs them. Raises
    ModelUnavailable (not there, incomplete, damaged) or ConfigError (not supported); both say what is wrong and where.
    """
    chosen = resolve_dtype(dtype, device)
    path = _located(path_or_name)
    with _as_directory(path) as directory:
        spec, generation = _spec(directory), _generation_config(directory)
        if chosen == torch.float16 and not FAMILIES[spec.family].float16:
            raise ConfigError(f"dtype float16: activations of {spec.family} exceed its range; use bfloat16")
        library, steps = _library(spec, chosen, device, quantize) if native else (None, "torch (native is off)")
        product = NativeProducts(library) if library and quantize == "int8" else None
        forms = quantized_forms(quantize, spec, dtype=chosen, device=torch.device(device), int8_product=product)
        weights = load_weights(
            SafetensorsSource(directory), spec, dtype=chosen, device=device, forms=forms, native=library is not None
        )
        if library is not None:
            move_to_large_pages(weights)
        tokenizer = ChatTokenizer(directory) if any(map(Path.is_file, map(directory.joinpath, TOKENIZERS))) else None
    return LoadedModel(
        spec=spec,
        decoder=Decoder(spec, weights, library=library),
        tokenizer=tokenizer,
        fingerprint=_fingerprint(path, spec, chosen, quantize),
        generation_config=generation,
        steps=steps,
    )


def _library(spec: ModelSpec, dtype: torch.dtype, device: str, quantize: Quantization) -> tuple[Library | None, str]:
    """The library for a model's steps on a CPU, if there is one, and how those of few rows run."""
    if torch.device(device).type != "cpu":
        return None, "torch"
    try:
        library = checked(native_library(), spec, torch.int8 if quantize == "int8" else dtype)
    except Unavailable as error:
        logger.warning("all steps run through torch, decodes at about half of the speed: %s", error)
        return None, f"torch ({error})"
    return library, f"native ({library.lanes} lanes)"


def fingerprint_of(
    path_or_name: str | Path, *, dtype: str = "auto", device: str = "cpu", quantize: Quantization = "none"
) -> str:
    """The fingerprint of what `load_model` would load, without loading it. Raises as that does."""
    path = _located(path_or_name)
    with _as_directory(path) as directory:
        return _fingerprint(path, _spec(directory), resolve_dtype(dtype, device), quantize)


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """The dtype called `name` on `device`. Raises ConfigError for a dtype that the device has no arithmetic for."""
    on_cpu = torch.device(device).type == "cpu"
    if name == "fastest" and on_cpu and cpu_has_bfloat16():
        return fastest_dtype()
    if name in ("auto", "fastest"):
        return torch.float32 if on_cpu else torch.bfloat16
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not known; known: auto, fastest, {', '.join(DTYPES)}")
    if on_cpu and name != "float32" and not (name == "bfloat16" and cpu_has_bfloat16()):
        raise ConfigError(f"this CPU has no {name} arithmetic: it would be far slower; use float32")
    return DTYPES[name]


def cpu_has_bfloat16() -> bool:
    """Whether products of bfloat16 numbers run in hardware (AVX-512 BF16, AMX or an ARM core with BF16)."""
    if torch.backends.cpu.get_cpu_capability().startswith(("SVE", "NEON")):
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return any(probe() for probe in (torch.cpu._is_avx512_bf16_supported, torch.cpu._is_amx_tile_supported))


def _located(path_or_name: str | Path) -> Path:
    if isinstance(path_or_name, Path) or path_or_name.startswith(("/", ".", "~")):
        try:
            path = Path(path_or_name).expanduser()
            if path.exists():
                return path
        except (OSError, RuntimeError, ValueError) as error:  # an odd name, a folder without permission
            raise ModelUnavailable(f"{path_or_name}: cannot be used as a path ({error})") from error
        raise ModelUnavailable(f"{path}: there is no such model directory or GGUF file")
    from .hub import resolve

    return resolve(path_or_name)


@contextmanager
def _as_directory(path: Path) -> Iterator[Path]:
    """`path` itself, or for the time of loading a GGUF file in Hugging Face layout (four bytes a parameter on disk)."""
    if path.is_dir():
        yield path
        return
    if path.suffix != ".gguf":
        raise ModelUnavailable(f"{path}: neither a model directory nor a .gguf file")
    from .hub.convert import convert_gguf

    with TemporaryDirectory(prefix="promptsluice-gguf-") as scratch:
        try:
            convert_gguf(path, Path(scratch))
        except Exception as error:  # the readers beneath raise nearly anything for a damaged file
            raise ModelUnavailable(f"{path}: cannot be read as GGUF ({error})") from error
        yield Path(scratch)


def _spec(directory: Path) -> ModelSpec:
    config = _read_json(directory / "config.json")
    if config is None:
        raise ModelUnavailable(f"{directory}: no config.json; this is not a model directory in Hugging Face layout")
    if quantization := config.get("quantization_config"):
        method = quantization.get("quant_method")
        raise ConfigError(f"weights quantized with {method} are not supported", file=str(directory / "config.json"))
    spec = spec_from_config(config)
    return replace(spec, eos_ids=eos_ids(_generation_config(directory)) or spec.eos_ids)


def _generation_config(directory: Path) -> Mapping[str, Any]:
    return _read_json(directory / "generation_config.json") or {}


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, dict):
        raise ModelUnavailable(f"{path}: must hold a JSON object")
    return value


def _fingerprint(path: Path, spec: ModelSpec, dtype: torch.dtype, quantize: Quantization) -> str:
    """Digest of what is computed, and each weight file's size and evenly spread samples: any retraining shows."""
    digest = blake2b(repr((replace(spec, eos_ids=()), str(dtype), quantize)).encode(), digest_size=16)
    for file in [path] if path.is_file() else weight_files(path):
        for chunk in _samples(file):
            digest.update(chunk)
    return digest.hexdigest()


def _samples(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    yield size.to_bytes(8, "little")
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
            yield file.read(SAMPLE_BYTES)
