#!/usr/bin/env bash
# Cap a real network interface in both directions, or take the cap away. Run as root on every node of a job.
#
#   cap_nic.sh [--dry-run] INTERFACE RATE     RATE as tc(8) writes it: 500mbit, 10gbit
#   cap_nic.sh [--dry-run] INTERFACE undo
#
# Sending: a token bucket on the interface. Receiving: what arrives is redirected through an ifb device, which has a
# token bucket too. The cap holds for everything on the interface, ssh included. A later RATE replaces an earlier one.
set -euo pipefail

usage() {
    sed -n '4,5s/^# *//p' "$0" >&2
    exit 2
}

fail() {
    echo "cap_nic.sh: $*" >&2
    exit 1
}

dry_run=false
if [[ "${1:-}" == --dry-run ]]; then
    dry_run=true
    shift
fi
[[ $# -eq 2 ]] || usage
interface=$1 rate=$2
mirror="ifb_${interface:0:11}" # a name has at most 15 characters
handle=7a6c                    # marks the queues that this script made

run() {
    if $dry_run; then
        echo "$*"
    else
        "$@"
    fi
}

bits_per_second() {
    local number unit factor
    [[ "$1" =~ ^([0-9]+)(k|m|g)bit$ ]] || fail "the rate $1 is not a whole number of kbit, mbit or gbit, such as 10gbit or 500mbit"
    number=${BASH_REMATCH[1]} unit=${BASH_REMATCH[2]}
    case $unit in k) factor=1000 ;; m) factor=1000000 ;; *) factor=1000000000 ;; esac
    ((number > 0)) || fail "the rate $1 caps nothing; give more, such as 500mbit"
    echo $((number * factor))
}

check_machine() {
    [[ $EUID -eq 0 ]] || fail "root is needed (CAP_NET_ADMIN)"
    command -v tc >/dev/null || fail "tc is missing; install iproute2"
    [[ -e /sys/class/net/$interface ]] || ip link show "$interface" >/dev/null 2>&1 || fail "there is no interface $interface"
}

check_nobody_elses() {
    local root
    root=$(tc qdisc show dev "$interface" root | head -n 1)
    # The kernel's own default has handle 0.
    if [[ -n $root && $root != *" 0: "* && $root != *" $handle: "* ]]; then
        fail "$interface already has a queue that somebody configured: $root"
    fi
    if tc qdisc show dev "$interface" | grep -q ' ffff: ' && ! ip link show "$mirror" >/dev/null 2>&1; then
        fail "$interface already has an ingress filter that somebody configured"
    fi
}

cap() {
    local bits burst limit
    bits=$(bits_per_second "$rate")
    burst=$((bits / 8 / 500)) # 2 ms: an idle link must not save up credit that a step then spends
    ((burst >= 10000)) || burst=10000
    limit=$((burst + (16 << 20)))
    local bucket=(tbf rate "${bits}bit" burst "$burst" limit "$limit")
    $dry_run || modprobe ifb numifbs=0 2>/dev/null || true # may be built in; the next line tells
    if $dry_run || ! ip link show "$mirror" >/dev/null 2>&1; then
        run ip link add "$mirror" type ifb
    fi
    run ip link set "$mirror" up
    run tc qdisc replace dev "$mirror" root handle "$handle:" "${bucket[@]}"
    run tc qdisc replace dev "$interface" handle ffff: ingress
    run tc filter replace dev "$interface" parent ffff: protocol all prio 1 handle 800::800 u32 match u32 0 0 \
        action mirred egress redirect dev "$mirror"
    run tc qdisc replace dev "$interface" root handle "$handle:" "${bucket[@]}"
}

undo() {
    if $dry_run || tc qdisc show dev "$interface" root | grep -q " $handle: "; then
        run tc qdisc del dev "$interface" root
    fi
    if $dry_run || ip link show "$mirror" >/dev/null 2>&1; then
        run tc qdisc del dev "$interface" ingress
        run ip link del "$mirror"
    fi
}

if ! $dry_run; then
    check_machine
    check_nobody_elses
fi
if [[ $rate == undo ]]; then
    undo
else
    cap
fi
