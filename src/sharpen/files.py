"""Files that others read: whole, or not there at all."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

_PARTIAL = ".partial"
_ELSEWHERE = re.compile(r"global_step_\d+|exchange|images")


def write_whole(
    path: Path, content: bytes | str, *, lasting: bool = True, flush: Callable[[int], None] = os.fsync
) -> None:
    """Write a file that other processes see whole or not at all, and that is on disk when this returns; one that can be
    made again need not be (`lasting`). Text is written as UTF-8; what that cannot hold (half of a surrogate pair) as an
    escape. Several threads and processes may write the same file: one of them wins. Who may read it stays as it is;
    other names of the same file (hard links) keep what it held. `flush` puts what a descriptor of a file or of a folder
    stands for on disk. Raises `OSError` with the name of the file."""
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    try:
        if (descriptor := _descriptor_of(path)) is not None:
            sys.stdout.flush()
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.write(content)
        elif path.exists() and not path.is_file():  # a device, a pipe: nothing to replace
            path.write_bytes(content)
        else:
            _replace(path, content, flush if lasting else None)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None
        raise


def _replace(path: Path, content: bytes, flush: Callable[[int], None] | None) -> None:
    partial = partial_of(path)
    try:
        with partial.open("xb") as file:
            with contextlib.suppress(OSError):  # a new file, or a file system without modes
                partial.chmod(path.stat().st_mode & 0o777)
            file.write(content)
            if flush is not None:
                file.flush()
                flush(file.fileno())
        partial.replace(path.resolve())
        if flush is not None:
            flush_folder(partial.parent, flush)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def check_writable(path: Path) -> None:
    """Raise `OSError` with the name of the file if `write_whole` could not write it: before the work whose result it
    is to hold."""
    if _descriptor_of(path) is not None:
        return
    if path.exists() and not path.is_file():
        with path.open("ab"):
            return
    partial = partial_of(path)
    try:
        partial.touch()
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def check_links(run_dir: Path) -> None:
    """Raise `OSError` if a symbolic link in a run's directory, which somebody else may have made, leads out of it: what
    is written there would be written elsewhere. The files that a monitoring service keeps below `monitor/` are its own:
    no run opens them again, and W&B links to its logs. What is large may be on another disk (`_ELSEWHERE`)."""
    whole = run_dir.resolve()
    for place, folders, files in os.walk(whole):
        services = len(Path(place).relative_to(whole).parts) > 1 and Path(place).is_relative_to(whole / "monitor")
        for path in (Path(place, name) for name in (*folders, *(() if services else files))):
            if path.is_symlink() and not _may_lead_out(path, whole):
                reason = f"a link that leads out of {run_dir} (to {os.readlink(path)}); remove it to write there"
                raise OSError(errno.ELOOP, reason, os.fspath(path))


def _may_lead_out(path: Path, whole: Path) -> bool:
    """Whether a link stays in a run's directory, or may lead out of it: to the folder of a checkpoint, of weights or of
    images. Of a pointer to a link, that link is to be judged."""
    if Path(os.path.realpath(path)).is_relative_to(whole):
        return True
    if path in (whole / "latest", whole / "best"):
        path = Path(os.path.normpath(path.parent / os.readlink(path)))
        return path.parent == whole and path.is_symlink()
    return path.parent == whole and path.is_dir() and _ELSEWHERE.fullmatch(path.name) is not None


def check_regular(folder: Path) -> None:
    """Raise `OSError` if a folder, which somebody else may have made, holds what is no file: a pipe, a device, or a
    link to one, which to read may never end."""
    folders = [os.fspath(folder)]
    while folders:
        with contextlib.suppress(PermissionError, FileNotFoundError, NotADirectoryError):  # gone meanwhile, or private
            for entry in _entries(folders.pop()):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False) and not _leads_to_file(Path(entry.path)):
                    raise OSError(errno.EINVAL, "it is no file, but a pipe or a device", entry.path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return what a folder holds, whose kinds are known without a look at each file."""
    with os.scandir(folder) as entries:
        return list(entries)


def _leads_to_file(path: Path) -> bool:
    """Whether a link leads to a file, to a folder, or to nothing."""
    return path.is_file() or path.is_dir() or not path.exists()


def give_mode_of_new(folder: Path) -> None:
    """Give the files of a new folder, of which libraries write some for their owner alone, the mode that the process
    gives to its files. Names of files elsewhere (hard links, symbolic links) stay as they are. Raises `OSError`."""
    probe = partial_of(folder / "mode")
    probe.touch(exist_ok=False)
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_nlink == 1:
            with contextlib.suppress(PermissionError, NotImplementedError):  # a file system without modes
                path.chmod(mode)


def partial_files(folder: Path) -> Iterator[Path]:
    """Yield what `write_whole` left in a folder when its process was killed."""
    return folder.glob(f".*{_PARTIAL}")


def flush_folder(folder: Path, flush: Callable[[int], None] = os.fsync) -> None:
    """Put the names in a folder on disk, where the file system can. Raises `OSError`."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        flush(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _descriptor_of(path: Path) -> int | None:
    """Return the descriptor of this process that a name like `/dev/stdout` or `/dev/fd/3` stands for, None for any
    other. What it leads to may be a file, into which this process has written before, and writes on."""
    path = Path(os.path.abspath(path))
    if path in (Path("/dev/stdout"), Path("/dev/stderr")):
        return 1 if path.name == "stdout" else 2
    is_number = path.name.isascii() and path.name.isdigit()
    return int(path.name) if is_number and path.parent in (Path("/dev/fd"), Path("/proc/self/fd")) else None


def partial_of(path: Path) -> Path:
    """Return a name beside a file under which it is written first; no other writer has the same."""
    path = path.resolve()
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{_PARTIAL}")


def near_path(path: str | Path) -> str:
    """Return `; did you mean 'data/train.jsonl'?` for a path that is not there, if its folder has a name like its own;
    else an empty text. The first folder of the path that is not there is the one that is looked for."""
    missing = Path(path).expanduser()
    while missing.parent != missing and not missing.parent.is_dir():
        missing = missing.parent
    try:
        names = os.listdir(missing.parent)
    except OSError:
        return ""
    near = difflib.get_close_matches(missing.name, names, n=1)
    if not near or missing.exists():
        return ""
    return f"; did you mean {str(missing.parent / near[0])!r}?"
