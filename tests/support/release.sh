#!/bin/sh
# Build the wheel and the source archive, and try both as a stranger would: the wheel in an environment without any
# extra, the tests of the archive from the archive. TORCH as in the Makefile; arguments go to the archive's pytest.
set -e
bin=$(pwd)/.venv/bin
rm -rf dist .venv-release
"$bin/python" -m hatchling build -d dist

echo "The wheel, without extras ..."
"$bin/python" -m venv .venv-release
pip="$(pwd)/.venv-release/bin/python -m pip --disable-pip-version-check"
$pip install -qq --no-compile -c constraints.txt "$TORCH"
$pip install -qq --no-compile -c constraints.txt dist/*.whl
place=$(mktemp -d)
sed -n '/^```python$/,/^```$/{/^```/d;p}' README.md >"$place/readme.py"
(cd "$place" && "$OLDPWD/.venv-release/bin/python" -W error::ImportWarning readme.py && "$OLDPWD/.venv-release/bin/rigidities" --version)

echo "The archive's own tests ..."
tar xzf dist/*.tar.gz -C "$place"
cd "$place"/rigidities-*
PYTHONPATH=$(pwd)/src OMP_NUM_THREADS=1 MPLBACKEND=Agg "$bin/python" -m pytest -q -n "${WORKERS:-2}" --dist loadgroup -p no:cacheprovider "$@"
rm -rf "$place" "$OLDPWD/.venv-release"
