#!/bin/busybox sh
# First process of the guest. Mounts the host's root read-only under a memory overlay and runs one command.
B=/bin/busybox
$B mount -t proc p /proc
$B mount -t sysfs s /sys
$B mount -t devtmpfs d /dev
for m in $($B cat /mods/order); do $B insmod /mods/$m || echo "guest: insmod $m failed"; done
share="-t 9p -o trans=virtio,version=9p2000.L,msize=1048576"
$B mount $share,cache=loose,ro host /host || echo "guest: no host directory"
$B mount -t tmpfs -o size=60% t /over
$B mkdir /over/upper /over/work
$B mount -t overlay -o lowerdir=/host,upperdir=/over/upper,workdir=/over/work o /new
$B mount -t proc p /new/proc
$B mount -t sysfs s /new/sys
$B mount --move /dev /new/dev
$B mkdir -p /new/dev/shm /new/dev/pts /new/out
$B mount -t tmpfs t /new/dev/shm
$B mount -t tmpfs t /new/run
$B mount -t devpts x /new/dev/pts
$B mount $share,cache=none out /new/out || echo "guest: no output directory"
$B ip link set lo up
$B hostname guest
echo "GUEST_UP"
$B chroot /new /bin/bash /out/command.sh
echo "$?" > /new/out/status
$B sync
echo "GUEST_DOWN"
$B poweroff -f
