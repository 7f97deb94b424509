#!/bin/sh
# Install the base of fedpress from wheels alone, with no compiler, and run its golden vectors:
#   sh tests/platforms/base_install.sh [FOLDER]      in the tree, on the machine in question
# FOLDER, by default a new one, keeps wheels and environment. Prints wheels, bytes and seconds.
set -eu
cd "$(dirname "$0")/../.."
folder=${1:-$(mktemp -d)}
mkdir -p "$folder"
python3 -c 'import platform as p; print(p.system(), p.machine(), *p.libc_ver(), p.python_version())'
python3 -m venv "$folder/venv"
pip="$folder/venv/bin/python -m pip --disable-pip-version-check"
ls "$folder"/fedpress-*.whl > /dev/null 2>&1 || $pip wheel --quiet --no-deps --wheel-dir "$folder" .
$pip download --quiet --only-binary=:all: -c constraints.txt --dest "$folder/wheels" "$folder"/fedpress-*.whl
begun=$(date +%s)
$pip install --quiet --no-index --find-links "$folder/wheels" fedpress
"$folder/venv/bin/fedpress" --version
echo "$(ls "$folder/wheels" | wc -l) wheels, $(cat "$folder"/wheels/*.whl | wc -c) bytes, installed in $(($(date +%s) - begun)) s"
$pip install --quiet --only-binary=:all: -c constraints.txt -r tests/platforms/requirements.txt
# What was installed, not the tree: the vectors and their readers alone are taken from here.
"$folder/venv/bin/python" -m pytest -q -p no:cacheprovider -o pythonpath= -m "not slow" \
  tests/compression/test_compressor_vectors.py tests/protocols/masking/test_masking_vectors.py \
  tests/protocols/test_signatures.py
