#!/usr/bin/env bash
# Prometheus and promtool of Debian, unpacked beside the tree: no service is installed or started.
#
#   bash tools/install_prometheus.sh FOLDER
set -euo pipefail
mkdir -p "$1"
cd "$1"
test -x usr/bin/promtool && exit 0
apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }
dpkg-deb -x prometheus_*.deb .
rm prometheus_*.deb
