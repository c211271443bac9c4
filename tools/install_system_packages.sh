#!/usr/bin/env bash
# Installs optional system packages: libibverbs for Mooncake's TransferEngine, Chromium for the test of the status page,
# and libfaketime for a test that sets clocks. Without the permission to install, the script names the missing packages
# and succeeds.
set -u
missing=()
ldconfig -p 2>/dev/null | grep -q 'libibverbs\.so\.1' || missing+=(libibverbs1)
compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null || missing+=(libfaketime)
command -v chromium >/dev/null 2>&1 || command -v google-chrome >/dev/null 2>&1 || missing+=(chromium)
[ "${#missing[@]}" -eq 0 ] && exit 0
apt=()
if command -v apt-get >/dev/null 2>&1; then
  if [ "$(id -u)" -eq 0 ]; then
    apt=(apt-get)
  elif command -v sudo >/dev/null 2>&1 && sudo -n true 2>/dev/null; then
    apt=(sudo -n apt-get)
  fi
fi
[ "${#apt[@]}" -gt 0 ] && "${apt[@]}" update -qq
for package in "${missing[@]}"; do
  if [ "${#apt[@]}" -gt 0 ] && "${apt[@]}" install -y -qq --no-install-recommends "$package"; then
    continue
  fi
  case "$package" in
    libibverbs1) lost="the mooncake transport will be unavailable" ;;
    libfaketime) lost="the test of clocks that jump will be skipped" ;;
    chromium) lost="the test of the status page in a browser will be skipped" ;;
  esac
  echo "windlass: $package is missing and could not be installed: $lost." >&2
  echo "windlass: install it with your package manager (Debian/Ubuntu: apt-get install $package)." >&2
done
exit 0
