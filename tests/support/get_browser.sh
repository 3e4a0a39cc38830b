#!/bin/sh
# Find a Chromium for the browser tests, or install Debian's where that can be done without asking.
# Never fails: tests that lack a browser are left out, or fail by themselves in CI.

# A name alone is not enough: Ubuntu's chromium only asks for a snap to be installed.
runs() {
	command -v "$1" >/dev/null 2>&1 && "$1" --version >/dev/null 2>&1
}

if [ -n "$CHROMIUM" ]; then
	runs "$CHROMIUM" || echo "CHROMIUM=$CHROMIUM is not a program that runs."
	exit 0
fi
for name in chromium chromium-browser google-chrome google-chrome-stable; do
	if runs "$name"; then
		exit 0
	fi
done
if [ "$(id -u)" = 0 ] && grep -q "^ID=debian" /etc/os-release 2>/dev/null && command -v apt-get >/dev/null 2>&1; then
	echo "Installing chromium for the browser tests (once) ..."
	export DEBIAN_FRONTEND=noninteractive
	said=$({ apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } 2>&1)
	if runs chromium; then
		exit 0
	fi
	echo "apt-get could not install a chromium that runs. Its last lines:"
	echo "$said" | tail -n 5
fi
echo "No Chromium found: the browser tests are left out. Install chromium, or set CHROMIUM=/path/to/it."
exit 0
