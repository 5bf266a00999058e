#!/usr/bin/env bash
# Usage: setup.sh VENV REQUIREMENTS [own]
# Installs the system packages that are missing, and makes the virtual
# environment VENV with the packages of the file REQUIREMENTS. Without `own`
# the environment is the caller's: it is checked, never changed.
set -euo pipefail

die() {
  echo "setup: $*" >&2
  exit 1
}

(($# >= 2)) || die "expected VENV REQUIREMENTS [own], but got $# arguments"
venv=$1 requirements=$2 own=${3:-}
[[ $venv ]] || die "VENV is empty: name a virtual environment, or leave VENV" \
  "out for one of this project's own"

system_packages=(
  build-essential catch2 ccache clang-format cmake git libbenchmark-dev
  libcli11-dev ninja-build nlohmann-json3-dev python3-dev python3-venv
  zlib1g-dev
)
is_installed() {
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$1" 2>&1) == installed ]]
}
missing=()
for package in "${system_packages[@]}"; do
  is_installed "$package" || missing+=("$package")
done
if ((${#missing[@]})); then
  if ((EUID == 0)); then
    as_root=()
  elif sudo -n true 2>/dev/null; then
    as_root=(sudo -n)
  else
    die "these system packages are missing, and installing them takes root:" \
      "apt-get install ${missing[*]}"
  fi
  echo "setup: installing ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
fi

# Prints the requirements that the environment lacks.
lacking() {
  "$venv/bin/python" - "$requirements" <<'PYTHON'
import importlib.metadata
import sys

for line in open(sys.argv[1]):
    name, pinned, version = line.partition("#")[0].strip().partition("==")
    try:
        if pinned and importlib.metadata.version(name).split("+")[0] == version:
            continue
    except importlib.metadata.PackageNotFoundError:
        pass
    if name:
        print(name + pinned + version)
PYTHON
}

if [[ ! $own ]]; then
  [[ -x $venv/bin/python ]] || die "there is no virtual environment $venv"
  lacks=$(lacking | tr '\n' ' ')
  [[ ! $lacks ]] || die "the environment $venv lacks ${lacks% }; it is not" \
    "this project's own, so install them there or leave VENV out"
  exit 0
fi
[[ -x $venv/bin/python ]] || python3 -m venv "$venv"
if [[ $(lacking) ]]; then
  echo "setup: installing $requirements into $venv"
  "$venv/bin/python" -m pip install -q -r "$requirements"
fi
