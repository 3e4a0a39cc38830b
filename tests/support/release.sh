#!/bin/sh
# Build the wheel and the source archive, and try both as a stranger would: the wheel in an environment without any
# extra, the tests of the archive from the archive. TORCH as in the Makefile; arguments go to the archive's pytest.
set -e
here=$(pwd)
bin=$here/.venv/bin
tried=$here/.venv-release
place=$(mktemp -d)
trap 'rm -rf "$place" "$tried"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
rm -rf dist "$tried"
echo "The public surface (docs/reference/surface.txt) ..."
cat docs/reference/surface.txt
"$bin/python" -m hatchling build -d dist

echo "The wheel, without extras ..."
"$bin/python" -m venv "$tried"
install() { "$tried/bin/python" -m pip --disable-pip-version-check install -qq --no-compile -c constraints.txt "$@"; }
install "$TORCH"
install dist/*.whl
sed -n '/^```python$/,/^```$/{/^```/d;p}' README.md >"$place/readme.py"
(cd "$place" && "$tried/bin/python" -W error::ImportWarning readme.py && "$tried/bin/rigidities" --version)

echo "The archive's own tests ..."
tar xzf dist/*.tar.gz -C "$place"
cd "$place"/rigidities-*
PYTHONPATH=$(pwd)/src OMP_NUM_THREADS=1 MPLBACKEND=Agg "$bin/python" -m pytest -q -n "${WORKERS:-2}" --dist loadgroup -p no:cacheprovider "$@"
