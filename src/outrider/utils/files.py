"""Atomic writes of files and directories, reading of weight files, hashes."""

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
    """Outrider's cache of this user: $OUTRIDER_CACHE, else outrider/ under $XDG_CACHE_HOME or ~/.cache."""
    if configured := os.environ.get("OUTRIDER_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider"


# Temporary names: .NAME.outrider-<32 random hex digits>, with .tmp (a file) or .old (what is being replaced) behind it.
# Nothing with another name is ever removed.
_TEMPORARY = re.compile(r"\.(.+)\.outrider-[0-9a-f]{32}(\.tmp|\.old)?", re.DOTALL)


def _temporary(path: Path, suffix: str = "") -> Path:
    return path.with_name(f".{path.name}.outrider-{uuid.uuid4().hex}{suffix}")


def unfinished_writes(directory: Path, *names: str) -> list[Path]:
    """What writers of files and directories of these names (none: of any) have not finished, or left when killed."""
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    found = ((path, _TEMPORARY.fullmatch(path.name)) for path in entries)
    return [path for path, match in found if match and (not names or match[1] in names)]


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
        content: text (written as UTF-8), bytes, or what writes into the open file.
        durable: content and name are on disk when this returns.
        sole_writer: one process at a time writes `path`: what a killed one left is removed first.
        keep_first: several processes may bring the file, and whoever comes first decides.

    Raises:
        OSError: the disk is full or not writable; what was at `path` is untouched, and the temporary file is gone.
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
        if not keep_first or not path.exists():  # else another process was faster, and may have cleared up after us
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
    """Free on the disk that `directory` is on, or will be."""
    existing = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(existing).free


def check_space(directory: Path, needed: int, what: str, remedy: str) -> None:
    """Refuse work that the disk has no room for.

    Args:
        what: takes `needed` bytes.
        remedy: a sentence that says what to do.

    Raises:
        ValueError: fewer bytes are free.
    """
    free = free_bytes(directory)
    if needed > free:
        raise ValueError(
            f"{what} needs {needed} bytes ({needed / 2**30:.1f} GB) and the disk of {directory} has {free} "
            f"({free / 2**30:.1f} GB) free: nothing was written. {remedy}"
        )


def invalid_fields(error: ValidationError, whole: str = "") -> list[str]:
    """`name: message` of each field that pydantic refused; `whole` is the name where it is no single field."""
    found = [(".".join(map(str, e["loc"])) or whole, e["msg"].removeprefix("Value error, ")) for e in error.errors()]
    return [f"{name}: {message}" for name, message in found]


@contextmanager
def atomic_directory(destination: Path) -> Iterator[Path]:
    """A staging directory beside `destination` that takes its place when the block ends well, and vanishes otherwise.

    Raises:
        OSError: the disk is full or not writable, or `destination` is a file; what was there is untouched.
    """
    if destination.is_file():
        raise NotADirectoryError(errno.ENOTDIR, f"{destination} is a file: choose another place, or move it away.")
    destination.parent.mkdir(parents=True, exist_ok=True)
    recover_interrupted_write(destination)
    staging = _temporary(destination)
    staging.mkdir()  # not mkdtemp: a checkpoint must be readable by whom the umask allows
    try:
        with marked_in_use(staging):
            yield staging
            for file in staging.iterdir():
                file.chmod(staging.stat().st_mode & 0o666)  # safetensors writes files for the owner only
            if os.path.lexists(destination):
                retired = staging.with_name(f"{staging.name}.old")
                destination.rename(retired)
                try:
                    staging.rename(destination)
                except OSError:
                    retired.rename(destination)
                    raise
                with suppress(FileNotFoundError):  # another process has removed it
                    retired.rename(staging)  # without .old: nobody restores it, should we be killed while it is removed
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

    What belongs to a writer that is alive stays as it is.
    """
    found = unfinished_writes(destination.parent, destination.name)
    left = [path for path in found if not is_held(path.with_name(path.name.removesuffix(".old")))]
    retired = [path for path in left if path.suffix == ".old"]
    if retired and not os.path.lexists(destination):
        last = max(retired, key=lambda path: path.lstat().st_ctime_ns)
        with suppress(FileNotFoundError):  # another process was faster
            last.rename(destination)  # killed between the two renames: it was complete
        left.remove(last)
    for path in left:
        _remove(path)


def _remove(path: Path) -> None:
    """Remove a temporary file or directory, or the link that stood in its place."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")  # the latter: Medusa's own releases
_MASK = "mask_embedding.pt"  # vLLM reads it beside a DFlash drafter's weights
_INDEX = "model.safetensors.index.json"
_FLOATS = {torch.float64, torch.float32, torch.bfloat16, torch.float16}
_PICKLES = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}
_ARCHIVES = {".zip", ".tar", ".gz", ".tgz", ".xz", ".7z", ".bz2", ".zst", ".nemo"}


def refuse_archive(path: Path) -> None:
    """Refuse a file that is given in place of a directory, and say what to do with it.

    Raises:
        ValueError: it is a file.
    """
    if not path.is_file():
        return
    if path.suffix in _PICKLES:
        raise ValueError(f"{path} is a pickle, which can run code when it is read. {_CONVERT}")
    if path.suffix in _ARCHIVES:
        raise ValueError(f"{path} is an archive: unpack it and give the directory with config.json in it.")
    if path.suffix == ".gguf":
        raise ValueError(
            f"{path} is a GGUF, which llama.cpp reads: give the Hugging Face directory it was converted from."
        )
    raise ValueError(f"{path} is a file: give the directory that holds config.json and model.safetensors.")


_CONVERT = (
    "Outrider reads safetensors only: ask its maker for them, or convert it yourself with torch.load(file, "
    "weights_only=True) and safetensors.torch.save_file(tensors, 'model.safetensors')."
)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint directory.

    Raises:
        ValueError: there are none, or an index names what is not there.
    """
    if (directory / _MASK).exists():
        raise ValueError(f"{directory / _MASK} is a pickle with a mask embedding that no drafter here has. {_CONVERT}")
    for name in _WEIGHTS:
        if (directory / name).is_file():
            return [directory / name]
    index = directory / _INDEX
    if index.is_file():
        try:
            names = sorted(set(read_json(index)["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise ValueError(f"{index}: weight_map is not a mapping of tensors to files ({error!r}).") from error
        strange = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        if strange or not names:
            raise ValueError(f"{index}: weight_map names {strange or 'no files'}; it must name files beside it.")
        return [directory / name for name in names]
    pickles = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES | _ARCHIVES)
    if pickles:
        raise ValueError(
            f"{directory / pickles[0]} is a pickle or an archive, which can run code when read. {_CONVERT}"
        )
    raise ValueError(f"{directory / _WEIGHTS[0]} is missing: not a complete checkpoint directory.")


def read_weights(directory: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a checkpoint directory whose names begin so, whether in one file or in parts.

    Raises:
        ValueError: missing, not readable safetensors, or a tensor that is in two files.
    """
    found: dict[str, Tensor] = {}
    for path in weight_files(directory):
        tensors = read_tensors(path, prefix)
        if twice := sorted(set(tensors) & set(found)):
            raise ValueError(f"{path}: tensor {twice[0]} is in another file of {directory} too.")
        found |= tensors
    return found


class StoredTensor(NamedTuple):
    """A tensor as its file's header has it; `kind` is safetensors' word for the type, as BF16."""

    path: Path
    shape: list[int]
    kind: str


def stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint directory by name, from the headers of its files: no weights are read.

    Raises:
        ValueError: see `read_weights`.
    """
    found: dict[str, StoredTensor] = {}
    for path in weight_files(directory):
        with _readable(path), safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            found |= {name: StoredTensor(path, list(s.get_shape()), s.get_dtype()) for name, s in slices.items()}
    return found


def read_tensors(path: Path, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a safetensors file whose names begin so.

    Raises:
        ValueError: missing or not a readable safetensors file.
    """
    with _readable(path):
        if not prefix:
            return load_file(path)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turns what safetensors raises for a damaged file into a ValueError that names it."""
    if not path.is_file():
        raise ValueError(f"{path} is missing: not a complete checkpoint directory.")
    try:
        yield
    except (SafetensorError, UnicodeDecodeError, KeyError, OverflowError, TypeError) as error:
        raise ValueError(f"{path} is not a readable safetensors file ({error}); save or fetch it again.") from error


def check_tensors(
    path: Path,
    found: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    source: str = "config.json",
    exact_types: bool = False,
) -> None:
    """Check names, shapes and types of the tensors of a file.

    Args:
        wanted: tensors of the right shapes and types; meta tensors will do.
        source: what `wanted` follows from, for messages.
        exact_types: whether one floating-point type may not stand for another. Integers never stand for floats.

    Raises:
        ValueError: naming what is missing, unknown, or of another shape or type.
    """
    missing = sorted(set(wanted) - set(found))
    unknown = sorted(set(found) - set(wanted))
    if missing or unknown:
        parts = [
            f"{what} {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
            for what, names in (("missing", missing), ("unknown", unknown))
            if names
        ]
        raise ValueError(f"{path}: tensors do not match {source}: {'; '.join(parts)}.")
    for name, tensor in wanted.items():
        if found[name].shape != tensor.shape:
            raise ValueError(
                f"{path}: {name} has shape {list(found[name].shape)}, {source} implies {list(tensor.shape)}."
            )
        same = found[name].dtype == tensor.dtype
        if not same and (exact_types or not {found[name].dtype, tensor.dtype} <= _FLOATS):
            raise ValueError(f"{path}: {name} is of type {found[name].dtype}, {source} implies {tensor.dtype}.")


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Refuse weights that hold NaN or infinity.

    Raises:
        ValueError: naming the tensors.
    """
    # A finite sum has only finite terms, costs one reading and no copy; one that overflows is looked at again.
    broken = [
        name
        for name, tensor in tensors.items()
        if tensor.dtype in _FLOATS and not tensor.sum().isfinite() and not tensor.isfinite().all()
    ]
    if broken:
        more = f" and {len(broken) - 3} more" if len(broken) > 3 else ""
        raise ValueError(
            f"{path}: {', '.join(broken[:3])}{more} has NaN or infinity: training diverged or the file was damaged. "
            "Fetch it again or take an earlier checkpoint."
        )


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, as hex digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def check_outputs(*directories: Path | None, files: Sequence[Path | None] = ()) -> None:
    """Refuse, before hours of work, places where results cannot be written; nothing is created.

    Raises:
        ValueError: a file is a directory, or a directory would be inside a file or inside a read-only directory.
    """
    for file in files:
        if file is not None and file.is_dir():
            raise ValueError(f"{file} is a directory: name a file.")
    for place in (*directories, *(file and file.parent for file in files)):
        there = place and next(above for above in (place, *place.parents) if above.exists())
        if there is not None and not (there.is_dir() and os.access(there, os.W_OK)):
            kind = "is read-only" if there.is_dir() else "is a file"
            raise ValueError(f"nothing can be written to {place}: {there} {kind}.")
