#!/usr/bin/env bash
# A cluster of one machine, for as long as a command runs, as root:
#   tests/mpi/cluster.sh slurm COMMAND...   Slurm's own daemons: `srun` starts processes
#   tests/mpi/cluster.sh hosts COMMAND...   two hosts, each a network of its own, for two processes each: $HALFBYTE_MPIRUN,
#                                           mpirun of Open MPI, gets the options that name them
# Exit code 77: this machine does not allow it, or lacks the programs.
set -euo pipefail

work=$(mktemp -d)
chmod 755 "$work"
unavailable() {
  echo "cluster.sh: $1"
  exit 77
}

run_slurm() {
  local host pids=()
  for program in slurmctld slurmd srun; do command -v $program >/dev/null || unavailable "there is no $program"; done
  host=$(hostname -s)
  mkdir "$work/state" "$work/spool"
  cat >"$work/slurm.conf" <<END
ClusterName=halfbyte
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/linear
SchedulerType=sched/builtin
SlurmdParameters=config_overrides
KillWait=1
NodeName=$host NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE
END
  export SLURM_CONF=$work/slurm.conf
  slurmctld -D >"$work/slurmctld.log" 2>&1 &
  pids+=($!)
  slurmd -D -N "$host" >"$work/slurmd.log" 2>&1 &
  pids+=($!)
  # shellcheck disable=SC2064
  trap "kill ${pids[*]} 2>/dev/null; wait; rm -rf '$work'" EXIT
  for ((tries = 0; tries < 60; ++tries)); do
    if [[ $(sinfo -h -o %t 2>/dev/null) == idle ]]; then
      timeout 30 srun -n 2 true || unavailable "Slurm starts no processes here"
      "$@"
      return
    fi
    sleep 0.5
  done
  tail -n 5 "$work"/slurm*.log
  unavailable "Slurm's daemons did not start"
}

run_hosts() {
  local bridge=hb$$ hosts=() i name
  command -v ip >/dev/null || unavailable "there is no ip"
  # shellcheck disable=SC2064
  trap "for i in 1 2; do ip link del $bridge.\$i; ip netns del 10.77.0.\$i; done 2>/dev/null; ip link del $bridge 2>/dev/null; rm -rf '$work'" EXIT
  ip link add "$bridge" type bridge 2>/dev/null || unavailable "networks cannot be made"
  ip addr add 10.77.0.100/24 dev "$bridge" && ip link set "$bridge" up
  for i in 1 2; do
    name=10.77.0.$i
    ip netns add "$name" || unavailable "networks cannot be made"
    ip link add "$bridge.$i" type veth peer name eth0 netns "$name"
    ip link set "$bridge.$i" master "$bridge" up
    ip -n "$name" addr add "$name/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" link set lo up
    hosts+=("$name:2")
  done
  # In place of ssh. What hosts would not have is their memory in common. Their names have no dots: of two that
  # are the same up to a dot, Open MPI's daemons take one directory, and one of them ends where both make it at a time.
  cat >"$work/shell" <<'END'
#!/bin/sh
host=$1
shift
exec ip netns exec "$host" unshare --uts sh -c "hostname host-${host##*.} && $*"
END
  chmod +x "$work/shell"
  HALFBYTE_MPIRUN+=" --host $(IFS=, && echo "${hosts[*]}") --mca plm_rsh_agent $work/shell"
  HALFBYTE_MPIRUN+=" --mca routed direct --mca plm_rsh_no_tree_spawn 1 --map-by node --mca btl self,tcp"
  HALFBYTE_MPIRUN+=" --mca oob_tcp_if_include 10.77.0.0/24 --mca btl_tcp_if_include 10.77.0.0/24"
  export HALFBYTE_MPIRUN
  "$@"
}

trap 'rm -rf "$work"' EXIT
kind=$1
shift
case $kind in
  slurm) run_slurm "$@" ;;
  hosts) run_hosts "$@" ;;
  *) sed -n '2,6s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
