#!/bin/sh
# Find a Chromium for the browser tests, or install Debian's where that can be done without asking.
# Never fails: tests that lack a browser are left out, or fail by themselves in CI.

if [ -n "$CHROMIUM" ]; then
	command -v "$CHROMIUM" >/dev/null 2>&1 || echo "CHROMIUM=$CHROMIUM is not a program."
	exit 0
fi
for name in chromium chromium-browser google-chrome google-chrome-stable; do
	if command -v "$name" >/dev/null 2>&1; then
		exit 0
	fi
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
	echo "Installing chromium for the browser tests (once) ..."
	export DEBIAN_FRONTEND=noninteractive
	if { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } >/dev/null 2>&1; then
		exit 0
	fi
	echo "apt-get could not install chromium."
fi
echo "No Chromium found: the browser tests are left out. Install chromium, or set CHROMIUM=/path/to/it."
exit 0
