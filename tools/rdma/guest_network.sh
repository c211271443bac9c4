#!/usr/bin/env bash
# guest_network.sh COMMAND...: two hosts in one guest, then COMMAND.
#
#   rxe_a on wire_a, 192.0.2.1  ----- wire -----  rxe_b on wire_b, 192.0.2.2
#
# Linux 6.1 has soft-RoCE in the first network namespace only, so both ends are in it, and routing
# is told to send what is for the other address over the wire instead of short-circuiting it.
set -eu
A=192.0.2.1 B=192.0.2.2
ip link add wire_a type veth peer name wire_b
for end in a b; do
  ip link set wire_$end mtu 4200
  sysctl -qw net.ipv4.conf.wire_$end.accept_local=1 net.ipv4.conf.wire_$end.rp_filter=0
done
sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.all.arp_ignore=1
ip addr add $A/32 dev wire_a
ip addr add $B/32 dev wire_b
ip link set wire_a up
ip link set wire_b up
ip route add $B dev wire_a src $A table 100
ip route add $A dev wire_b src $B table 100
ip rule add pref 10 iif wire_a lookup local
ip rule add pref 10 iif wire_b lookup local
ip rule add pref 20 iif lo lookup 100
ip rule add pref 30 lookup local
ip rule del pref 0
rdma link add rxe_a type rxe netdev wire_a
rdma link add rxe_b type rxe netdev wire_b
exec "$@"
