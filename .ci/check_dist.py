"""Checks what the source distribution and the wheel in a folder hold: the one package, whole, and nothing beside it."""

import pathlib
import sys
import tarfile
import zipfile

ROOT = pathlib.Path(__file__).parents[1]


def main(folder: pathlib.Path):
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "quest_jax").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE")]
    with tarfile.open(sdist) as archive:
        in_sdist = {member.name.partition("/")[2] for member in archive.getmembers() if not member.isdir()}
    in_sdist = {name for name in in_sdist if ".egg-info/" not in name}
    beside = {"PKG-INFO", "setup.cfg", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
    problems = [f"wheel lacks {name}" for name in sorted(package - in_wheel)]
    problems += [f"wheel holds {name}" for name in sorted(in_wheel - package)]
    problems += [f"sdist lacks {name}" for name in sorted((package | beside) - in_sdist)]
    problems += [f"sdist holds {name}" for name in sorted(in_sdist - package - beside)]
    problems += [] if licenses else ["wheel lacks its license"]
    if problems:
        sys.exit("\n".join(problems))
    print(f"{sdist.name} ({sdist.stat().st_size} bytes), {wheel.name} ({wheel.stat().st_size} bytes): complete")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
