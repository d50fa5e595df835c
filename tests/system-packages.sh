#!/bin/sh
# What the tests need of a Linux system: Chromium, and a Vulkan loader with a driver (Mesa's CPU
# driver will do). Installs what is missing on Debian as root; elsewhere says what it is and fails.
set -eu

[ "$(uname -s)" = Linux ] || exit 0

has() { command -v "$1" >/dev/null 2>&1; }

missing=
has chromium || has chromium-browser || has google-chrome || missing="$missing chromium"
PATH="$PATH:/sbin:/usr/sbin" ldconfig -p | grep -q 'libvulkan\.so\.1' || missing="$missing libvulkan1"
ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json 2>/dev/null | grep -q . ||
    missing="$missing mesa-vulkan-drivers"

[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && has apt-get; then
    echo "Installing$missing"
    apt-get update -qq
    # shellcheck disable=SC2086  # a list of words
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing
else
    echo "The tests need these packages of the system, by their Debian names:$missing" >&2
    echo "Install them, then run make test again. (On Debian, root's make test installs them.)" >&2
    exit 1
fi
