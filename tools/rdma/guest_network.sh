#!/usr/bin/env bash
# guest_network.sh COMMAND...: creates the network of several hosts in one guest, then runs COMMAND.
#
#   rxe_a on wire_a, 192.0.2.1  ----- wire -----  rxe_b on wire_b, 192.0.2.2
#
#   rxe_c on wire_c, 192.0.2.3  ---+--------+---  rxe_d on wire_d, 192.0.2.4
#                                  | switch |
#   rxe_e on wire_e, 192.0.2.5  ---+--------+---  rxe_f on wire_f, 192.0.2.6
#
# Hosts a and b have one NIC each, on a wire that a test can cut. c and e are two NICs of one host, d and f of another.
#
# Linux 6.1 supports soft-RoCE only in the first network namespace, so all ends are in it. Routing rules send packets for
# another address over the wire instead of delivering them locally.
set -eu
address() { echo "192.0.2.$(( $(printf '%d' "'$1") - 96 ))"; }
ip link add wire_a type veth peer name wire_b
ip link add switch type bridge stp_state 0
for end in c d e f; do
  ip link add wire_$end type veth peer name port_$end
  ip link set port_$end mtu 4200 master switch up
done
ip link set switch mtu 4200 up
sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.all.arp_ignore=1 net.ipv4.conf.all.arp_announce=2
for end in a b c d e f; do
  sysctl -qw net.ipv4.conf.wire_$end.accept_local=1 net.ipv4.conf.wire_$end.rp_filter=0
  ip link set wire_$end mtu 4200 up
  ip addr add "$(address $end)/32" dev wire_$end
  ip rule add pref 10 iif wire_$end lookup local
done
ip route add "$(address b)" dev wire_a src "$(address a)" table 100
ip route add "$(address a)" dev wire_b src "$(address b)" table 100
metric=1
for from in c d e f; do
  for to in c d e f; do
    # A socket without an interface uses the first route; a queue pair names its interface.
    [ $from = $to ] || ip route add "$(address $to)" dev wire_$from src "$(address $from)" table 100 metric $metric
  done
  metric=$((metric + 1))
done
ip rule add pref 20 iif lo lookup 100
ip rule add pref 30 lookup local
ip rule del pref 0
for end in a b c d e f; do rdma link add rxe_$end type rxe netdev wire_$end; done
exec "$@"
