"""Runs that take longer than a machine is at hand: packed beside their suite, they go on elsewhere.

    python papers/suite.py papers/slt/table1.toml --scale long --pack

packs what is under way into `NAME.SCALE.unfinished/`, an archive a run, to be committed. A suite
unpacks what it wants to run and does not find under `runs/papers/`, and throws an archive away when
its run is done. A run goes on from its last checkpoint, so it can be packed at any moment; on
another kind of CPU its last bits may be others from there on.
"""

import tarfile
from contextlib import suppress
from pathlib import Path

from sizewise.exchange import checkpoint


class Unfinished:
    """The archives of a suite at a scale.

    Attributes:
        folder: Where they are; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pack(self, runs: Path) -> list[Path]:
        """Pack the runs in a folder that have a checkpoint and are not done.

        Returns:
            Their archives, in the place of earlier ones.
        """
        under_way = [path.parent for path in sorted(runs.glob("*/config.toml"))]
        return [
            self._packed(run)
            for run in under_way
            if not (run / "result.json").exists() and checkpoint.rounds_done(run / "checkpoints")
        ]

    def unpack(self, run: Path) -> None:
        """Put a run into its folder, unless that is there or nothing was packed."""
        if not run.exists() and (archive := self._archive(run)).exists():
            with tarfile.open(archive) as packed:
                packed.extractall(run, filter="data")

    def drop(self, run: Path) -> None:
        """Throw away what was packed of a run, and the folder with the last archive."""
        if (archive := self._archive(run)).exists():
            archive.unlink()
            if not any(self.folder.iterdir()):
                self.folder.rmdir()

    def _packed(self, run: Path) -> Path:
        archive = self._archive(run)
        self.folder.mkdir(exist_ok=True)
        draft = archive.with_name(f".{archive.name}.tmp")
        with tarfile.open(draft, "w:xz") as packed:
            files = [path for path in sorted(run.rglob("*")) if path.is_file()]
            for path in files:
                # A run that goes on meanwhile throws old checkpoints away; it keeps the last two.
                with suppress(FileNotFoundError):
                    packed.add(path, path.relative_to(run))
        draft.rename(archive)
        return archive

    def _archive(self, run: Path) -> Path:
        return self.folder / f"{run.name}.tar.xz"
