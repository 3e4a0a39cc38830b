#!/bin/sh
# Run the suite with several Pythons and releases of PyTorch, and print the results as a Markdown table. Then
# compile and export frozen modules there, which the suite leaves out since a C++ compiler takes minutes.
# By default: the oldest release that pyproject.toml admits, 2.11, the pinned and the newest one, on every
# Python from 3.10 on that PATH has. TORCHES and PYTHONS choose, KEEP=1 keeps the environments (gigabytes);
# arguments go to pytest. Logs stay in .venv-versions/.

: "${PYTHONS:=$(for p in python3.10 python3.11 python3.12 python3.13 python3.14; do command -v $p; done)}"
folder=.venv-versions
table=$folder/table.md
failures=0

# The oldest, one whose compiler differed, the pinned and the newest release, the last for the Python $1.
releases() {
	sed -n 's/.*"torch>=\([0-9.]*\)".*/\1.0/p' pyproject.toml
	echo 2.11.0
	sed -n 's/^torch==\([0-9.]*\).*/\1/p' constraints.txt
	"$1" -m pip index versions torch 2>/dev/null | sed -n 's/^torch (\([0-9.]*\).*/\1/p'
}

# An environment $2 with PyTorch $3 for the Python $1. PyTorch comes first, with what it needs; the pins of
# constraints.txt hold for all the rest.
prepare() {
	test -e "$2/ready" && return
	"$1" -m venv "$2" || { result="no environment" && return 1; }
	pip="$2/bin/python -m pip --disable-pip-version-check"
	$pip install -qq "torch==$3" || { result="no build of PyTorch" && return 1; }
	$pip freeze | sed 's/==.*//; y/_./--/' >"$2/own.txt"
	awk -v own="$2/own.txt" 'BEGIN { while ((getline line < own) > 0) skip[tolower(line)] = 1 }
		{ split($0, part, "=="); if (!(tolower(part[1]) in skip)) print }' constraints.txt >"$2/pins.txt"
	echo "torch==$3" >>"$2/pins.txt"
	$pip install -qq -c "$2/pins.txt" -e ".[dev]" || { result="other packages cannot be had" && return 1; }
	# as in the Makefile
	! "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || $pip install -qq -c "$2/pins.txt" --no-deps skmatter
	touch "$2/ready"
}

mkdir -p $folder
printf '| Python | PyTorch | result | compiled and exported |\n| --- | --- | --- | --- |\n' >$table

# Pytest's last line in the log $1, without the seconds.
summary() {
	sed -n 's/^=* *\([0-9].*\) in [0-9.]*s.*/\1/p' "$1" | tail -n 1
}

for python in $PYTHONS; do
	number=$("$python" -c 'import platform; print(platform.python_version())')
	for torch in $(echo "${TORCHES:-$(releases "$python")}" | tr ' ' '\n' | awk '!seen[$0]++'); do
		name=$number-torch$torch
		echo "Python $number, PyTorch $torch ..." >&2
		roads=
		if prepare "$python" "$folder/$name" "$torch"; then
			pytest="$folder/$name/bin/python -m pytest -q -n ${WORKERS:-2}"
			OMP_NUM_THREADS=1 MPLBACKEND=Agg $pytest --dist loadgroup "$@" >"$folder/$name.log" 2>&1 || failures=$((failures + 1))
			result=$(summary "$folder/$name.log")
			OMP_NUM_THREADS=1 $pytest -m slow tests/last_layer/test_roads.py >"$folder/$name-roads.log" 2>&1 || failures=$((failures + 1))
			roads=$(summary "$folder/$name-roads.log")
		fi
		echo "| $number | $torch | ${result:-no result: see $folder/$name.log} | ${roads:-no result} |" >>$table
		test -n "$KEEP" || rm -rf "${folder:?}/$name"
	done
done
cat $table
exit $failures
