"""Write files and directories atomically, read weight files, hash files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, NamedTuple

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from outrider.utils.documents import read_json
from outrider.utils.locks import is_held, marked_in_use


def cache_dir() -> Path:
    """Return the user's cache directory: $OUTRIDER_CACHE, else outrider/ under $XDG_CACHE_HOME or ~/.cache."""
    if configured := os.environ.get("OUTRIDER_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider"


# Temporary names: .NAME.outrider-<32 random hex digits>, followed by .tmp (a file) or .old (being replaced). Nothing
# with another name is ever removed.
_TEMPORARY = re.compile(r"\.(.+)\.outrider-[0-9a-f]{32}(\.tmp|\.old)?", re.DOTALL)


def _temporary(path: Path, suffix: str = "") -> Path:
    return path.with_name(f".{path.name}.outrider-{uuid.uuid4().hex}{suffix}")


def unfinished_writes(directory: Path, *names: str) -> list[Path]:
    """List temporary files and directories of unfinished or killed writers, of these names or of all."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    matches = ((path, _TEMPORARY.fullmatch(path.name)) for path in entries)
    return [path for path, match in matches if match and (not names or match[1] in names)]


def write_atomically(
    path: Path,
    content: str | bytes | Callable[[IO[bytes]], object],
    *,
    durable: bool = False,
    sole_writer: bool = False,
    keep_first: bool = False,
) -> None:
    """Write a file atomically: a temporary file beside `path` is renamed to it.

    Args:
        content: text (written as UTF-8), bytes, or a function that writes into the open file.
        durable: whether content and name are on disk on return.
        sole_writer: whether only one process writes `path`, so that remains of killed writers are removed first.
        keep_first: whether to keep an existing file, for several processes that write the same one.

    Raises:
        OSError: the disk is full or not writable; `path` is unchanged and the temporary file is removed.
    """
    if sole_writer:
        for left in unfinished_writes(path.parent, path.name):
            _remove(left)
    staging = _temporary(path, ".tmp")
    try:
        with staging.open("xb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if keep_first:
            os.link(staging, path)
        else:
            staging.replace(path)
    except (FileExistsError, FileNotFoundError):
        if (
            not keep_first or not path.exists()
        ):  # otherwise another process was faster, and may have removed our temporary file
            raise
    finally:
        staging.unlink(missing_ok=True)
    if durable:
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def free_bytes(directory: Path) -> int:
    """Return the free bytes of the disk that holds `directory`, or will hold it."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_space(directory: Path, needed: int, what: str, remedy: str) -> None:
    """Refuse work that needs more space than the disk has.

    Args:
        what: subject of the message, which needs `needed` bytes.
        remedy: sentence with the fix.

    Raises:
        ValueError: fewer than `needed` bytes are free.
    """
    free = free_bytes(directory)
    if needed > free:
        raise ValueError(
            f"{what} needs {needed} bytes ({needed / 2**30:.1f} GB) and the disk of {directory} has {free} "
            f"({free / 2**30:.1f} GB) free: nothing was written. {remedy}"
        )


def invalid_fields(error: ValidationError, whole: str = "") -> list[str]:
    """List `name: message` for each field that pydantic refused; `whole` names errors of no single field."""
    errors = [(".".join(map(str, e["loc"])) or whole, e["msg"].removeprefix("Value error, ")) for e in error.errors()]
    return [f"{name}: {message}" for name, message in errors]


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """Yield a staging directory that replaces `destination` if the block succeeds, and is removed otherwise.

    Raises:
        OSError: the disk is full or not writable, or `destination` is a file; `destination` is unchanged.
    """
    if destination.is_file():
        raise NotADirectoryError(errno.ENOTDIR, f"{destination} is a file: choose another place, or move it away.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    recover_interrupted_write(destination)
    staging = _temporary(destination)
    staging.mkdir()  # not mkdtemp, whose directories are private: the umask decides who reads a checkpoint
    try:
        with marked_in_use(staging):
            yield staging
            for file in staging.iterdir():
                file.chmod(staging.stat().st_mode & 0o666)  # safetensors makes files private
            if os.path.lexists(destination):
                retired = staging.with_name(f"{staging.name}.old")
                destination.rename(retired)
                try:
                    staging.rename(destination)
                except OSError:
                    retired.rename(destination)
                    raise
                with suppress(FileNotFoundError):  # another process has removed it
                    retired.rename(
                        staging
                    )  # without .old it is not restored if this process is killed while removing it
            else:
                staging.rename(destination)
    except (OSError, SafetensorError) as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if full:
            raise OSError(
                errno.ENOSPC,
                f"the disk is full: nothing was saved to {destination}. Free space, or choose another place.",
            ) from error
        raise
    finally:
        _remove(staging)


def recover_interrupted_write(destination: Path) -> None:
    """Recover from a writer killed inside `atomic_directory`: restore the former directory, remove temporary ones.

    Directories of writers that still run are left alone.
    """
    unfinished = unfinished_writes(destination.parent, destination.name)
    left = [path for path in unfinished if not is_held(path.with_name(path.name.removesuffix(".old")))]
    retired = [path for path in left if path.suffix == ".old"]
    if retired and not os.path.lexists(destination):
        last = max(retired, key=lambda path: path.lstat().st_ctime_ns)
        with suppress(FileNotFoundError):  # another process was faster
            last.rename(destination)  # killed between the two renames: it was complete
        left.remove(last)
    for path in left:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a temporary file, directory or link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")  # the latter in Medusa's releases
_MASK = "mask_embedding.pt"  # vLLM reads it beside a DFlash drafter's weights
_INDEX = "model.safetensors.index.json"
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".xz", ".7z", ".bz2", ".zst", ".nemo"}


def refuse_archive(path: Path) -> None:
    """Refuse a file given instead of a directory; the message says how to fix it.

    Raises:
        ValueError: the path is a file.
    """
    if not path.is_file():
        return
    if path.suffix in _PICKLES:
        raise ValueError(f"{path} is a pickle, which can run code when read. {_CONVERT}")
    if path.suffix in _ARCHIVES:
        raise ValueError(f"{path} is an archive: unpack it and give the directory with config.json in it.")
    if path.suffix == ".gguf":
        raise ValueError(
            f"{path} is a GGUF file for llama.cpp: give the Hugging Face directory that it was converted from."
        )
    raise ValueError(f"{path} is a file: give the directory that holds config.json and model.safetensors.")


_CONVERT = (
    "Outrider reads safetensors only: ask its authors for them, or convert it yourself with torch.load(file, "
    "weights_only=True) and safetensors.torch.save_file(tensors, 'model.safetensors')."
)


def weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a checkpoint directory.

    Raises:
        ValueError: there are none, or the index is invalid.
    """
    if (directory / _MASK).exists():
        raise ValueError(
            f"{directory / _MASK} is a pickle with a mask embedding, which no drafter here has. {_CONVERT}"
        )
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return [directory / name]
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: weight_map is not a mapping of tensors to files ({error!r}).") from error
        invalid = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if invalid or not names:
            raise ValueError(f"{index}: weight_map names {invalid or 'no files'}; it must name files beside it.")
        return [directory / name for name in names]
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES | _ARCHIVES)
    if pickles:
        raise ValueError(
            f"{directory / pickles[0]} is a pickle or an archive, which can run code when read. {_CONVERT}"
        )
    raise ValueError(f"{directory / _WEIGHTS[0]} is missing: not a complete checkpoint directory.")


def read_weights(directory: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors of a checkpoint directory whose names begin with `prefix`, from one file or several.

    Raises:
        ValueError: a file is missing or no readable safetensors, or two files have the same tensor.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        part = read_tensors(path, prefix)
        if twice := sorted(set(part) & set(tensors)):
            raise ValueError(f"{path}: tensor {twice[0]} is in another file of {directory}, too; remove one of them.")
        tensors |= part
    return tensors


class StoredTensor(NamedTuple):
    """A tensor as described in its file's header; `kind` is safetensors' name of the type, such as BF16."""

    path: Path
    shape: list[int]
    kind: str


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Read the headers of a checkpoint's files: its tensors by name, without weights.

    Raises:
        ValueError: see `read_weights`.
    """
    stored: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        with _readable(path), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            stored |= {name: StoredTensor(path, list(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    return stored


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """Read the tensors of a safetensors file whose names begin with `prefix`.

    Raises:
        ValueError: the file is missing or no readable safetensors.
    """
    with _readable(path):
        if not prefix:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Convert safetensors' errors for a damaged file into a ValueError that names it."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: not a complete checkpoint directory.")
    try:
        yield
    except (SafetensorError, UnicodeDecodeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); save or fetch it again.") from error


def check_tensors(
    path: Path,
    tensors: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    source: str = "config.json",
    exact_types: bool = False,
) -> None:
    """Check names, shapes and types of the tensors of a file.

    Args:
        wanted: tensors of the required shapes and types, possibly on the meta device.
        source: origin of `wanted`, for messages.
        exact_types: whether floating-point types must be equal; otherwise any of them will do. Integers never replace
            floats.

    Raises:
        ValueError: a tensor is missing, unknown, or has another shape or type; the message names it.
    """
    missing = sorted(set(wanted) - set(tensors))
    unknown = sorted(set(tensors) - set(wanted))
    if missing or unknown:
        parts = [
            f"{what} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise ValueError(f"{path}: tensors do not match {source}: {'; '.join(parts)}.")
    for name, expected in wanted.items():
        tensor = tensors[name]
        if tensor.shape != expected.shape:
            raise ValueError(f"{path}: {name} has shape {list(tensor.shape)}, {source} implies {list(expected.shape)}.")
        same = tensor.dtype == expected.dtype
        if not same and (exact_types or not {tensor.dtype, expected.dtype} <= _FLOATS):
            raise ValueError(f"{path}: {name} is of type {tensor.dtype}, {source} implies {expected.dtype}.")


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights with NaN or infinity.

    Raises:
        ValueError: a tensor is not finite; the message names it.
    """
    # A finite sum has only finite terms and needs no copy; only a sum that overflows needs a second check.
    broken = [
        name
        for name, tensor in tensors.items()
        if tensor.dtype in _FLOATS and not tensor.sum().isfinite() and not tensor.isfinite().all()
    ]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise ValueError(
            f"{path}: {', '.join(broken[:3])}{more} has NaN or infinity: training diverged or the file is damaged. "
            "Fetch it again or use an earlier checkpoint."
        )


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hex digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def check_outputs(*directories: Path | None, files: Sequence[Path | None] = ()) -> None:
    """Refuse places where results cannot be written, before hours of work; nothing is created.

    Raises:
        ValueError: a file is a directory, or a directory would be inside a file or inside a read-only directory.
    """
    for file in files:
        if file is not None and file.is_dir():
            raise ValueError(f"{file} is a directory: name a file.")
    for place in (*directories, *(file and file.parent for file in files)):
        existing = place and next(above for above in (place, *place.parents) if above.exists())
        if existing is not None and not (existing.is_dir() and os.access(existing, os.W_OK)):
            kind = "is read-only" if existing.is_dir() else "is a file"
            raise ValueError(f"cannot write to {place}: {existing} {kind}. Choose another place.")
