#!/usr/bin/env bash
# Two nodes on one machine: network namespaces that are joined by a link of 200 Mbit/s. As root, with `ip` and `tc`:
#   bash docs/results/two_nodes.sh RANKS_PER_NODE benchmark --scaling --out FOLDER ...
set -euo pipefail
ranks=$1
shift
remove() { for node in a b; do ip netns delete "node-$node" 2>/dev/null || true; done; }
trap remove EXIT
remove
ip netns add node-a
ip netns add node-b
ip link add link-a type veth peer name link-b
for node in a b; do
  ip link set "link-$node" netns "node-$node"
  ip netns exec "node-$node" ip link set lo up
  ip netns exec "node-$node" ip link set "link-$node" up
  ip netns exec "node-$node" tc qdisc add dev "link-$node" root tbf rate 200mbit burst 256kb latency 8ms
done
ip netns exec node-a ip address add 10.77.0.1/24 dev link-a
ip netns exec node-b ip address add 10.77.0.2/24 dev link-b
pids=()
for node in b a; do
  GLOO_SOCKET_IFNAME="link-$node" ip netns exec "node-$node" python -m mmldlm launch --nnodes 2 --nproc-per-node "$ranks" \
    --rdzv-endpoint 10.77.0.1:29500 --log-dir "train_logs/$node" -- "$@" &
  pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done
