#!/usr/bin/env bash
# build_guest.sh DIR: builds the virtual machine of the verbs laboratory: DIR/vmlinuz and DIR/initrd.gz.
# The script unpacks a Debian kernel with the soft-RoCE driver and does not install it. It installs missing system
# packages. Without the permission to install, it names them and exits with status 3.
set -euo pipefail
DIR=$1
export PATH=$PATH:/usr/sbin:/sbin
PACKAGES=()
need() { command -v "$1" >/dev/null 2>&1 || PACKAGES+=("$2"); }
need qemu-system-x86_64 qemu-system-x86
need rdma iproute2
need tc iproute2
need depmod kmod
need cpio cpio
need ibv_devinfo ibverbs-utils
ls /etc/libibverbs.d/rxe.driver >/dev/null 2>&1 || PACKAGES+=(ibverbs-providers)
ldconfig -p | grep -q 'librdmacm\.so\.1' || PACKAGES+=(librdmacm1)

if [ ${#PACKAGES[@]} -gt 0 ]; then
  mapfile -t PACKAGES < <(printf '%s\n' "${PACKAGES[@]}" | sort -u)
  sudo=()
  if [ "$(id -u)" -ne 0 ]; then sudo=(sudo -n); fi
  if ! { command -v apt-get >/dev/null && "${sudo[@]}" apt-get update -qq \
         && "${sudo[@]}" apt-get install -y -qq --no-install-recommends "${PACKAGES[@]}" >/dev/null; }; then
    echo "verbs laboratory: missing system packages: ${PACKAGES[*]}" >&2
    exit 3
  fi
fi
if [ -s "$DIR/initrd.gz" ] && [ -s "$DIR/vmlinuz" ] && [ "$DIR/initrd.gz" -nt "$0" ]; then exit 0; fi

WORK=$(mktemp -d)
trap 'rm -rf "$WORK"' EXIT
mkdir -p "$DIR" "$WORK/debs" "$WORK/kernel"
kernel() { apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image-/{print $2; exit}'; }
download() { (cd "$WORK/debs" && apt-get download -qq "$(kernel)" busybox-static 2>"$WORK/why"); }
if ! download; then
  if [ "$(id -u)" -eq 0 ]; then apt-get update -qq; else sudo -n apt-get update -qq; fi
  download || { cat "$WORK/why" >&2
    echo "verbs laboratory: no Debian kernel package (linux-image-amd64) can be downloaded with apt" >&2; exit 3; }
fi
for deb in "$WORK"/debs/*.deb; do dpkg -x "$deb" "$WORK/kernel"; done
VERSION=$(ls "$WORK/kernel/lib/modules")
depmod -b "$WORK/kernel" "$VERSION"

ROOT=$WORK/root
mkdir -p "$ROOT"/{bin,mods,proc,sys,dev,host,over,new}
cp "$WORK/kernel/bin/busybox" "$ROOT/bin/"
ORDER=()
for module in virtio_pci virtio_net 9pnet_virtio 9p overlay veth bridge sch_tbf sch_netem \
              crc32_generic crc32c_generic rdma_rxe ib_uverbs rdma_ucm ib_umad; do
  for file in $(modprobe -d "$WORK/kernel" -S "$VERSION" --show-depends "$module" | awk '$1=="insmod"{print $2}'); do
    name=$(basename "$file")
    [[ " ${ORDER[*]-} " == *" $name "* ]] || { ORDER+=("$name"); cp "$file" "$ROOT/mods/"; }
  done
done
printf '%s\n' "${ORDER[@]}" > "$ROOT/mods/order"
cp "$(dirname "$0")/guest_init.sh" "$ROOT/init"
chmod +x "$ROOT/init"
cp "$WORK"/kernel/boot/vmlinuz-* "$DIR/vmlinuz"
(cd "$ROOT" && find . | cpio -o -H newc --quiet | gzip -1) > "$DIR/initrd.gz.part"
mv "$DIR/initrd.gz.part" "$DIR/initrd.gz"
echo "$VERSION" > "$DIR/version"
