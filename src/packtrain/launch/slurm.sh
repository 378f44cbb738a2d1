#!/bin/bash
$directives

# Written by `packtrain slurm`. A job that is queued again keeps its number, and so goes on with its own run.
set -eo pipefail
$setup
set -u

recipe=$recipe
folder=$folder
run=$run
requeue=$requeue
export SRUN_CPUS_PER_TASK=$$SLURM_CPUS_PER_TASK    # srun does not take it over from sbatch
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$seconds    # seconds for the checkpoint after Slurm's SIGTERM

# Names of nodes need not resolve: Slurm knows their addresses. This script runs on the first one.
address_of() { scontrol show node "$$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'; }
export -f address_of
head=$$(address_of "$$SLURMD_NODENAME")
port=$$(python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

state_of_run() {
    python3 -m packtrain runs show "$$run" --folder "$$folder" --json 2>/dev/null \
        | python3 -c 'import json, sys; print(json.load(sys.stdin)["state"])' 2>/dev/null || echo none
}

# The time limit is near: a checkpoint, if there is something to keep.
time_is_up() {
    near_limit=yes
    python3 -m packtrain runs stop "$$run" --folder "$$folder" --no-wait || kill "$$step" 2>/dev/null || true
}

# Whether to queue the job again: stopped by its time limit or a preemption, or a node does not answer any more.
again() {
    local job
    job=$$(scontrol show job "$$SLURM_JOB_ID")
    [[ $$requeue == yes && $$job == *JobState=RUNNING* ]] || return 1    # cancelled, or Slurm does it
    if [[ $$state == stopped ]]; then
        [[ $$near_limit == yes || $$job != *PreemptTime=None* ]]
    else
        ! timeout 60 srun --overlap --ntasks-per-node=1 true
    fi
}

# One torchrun a node. The first node keeps the store at which they meet.
near_limit=no
srun --kill-on-bad-exit=1 bash -c 'exec python3 -m torch.distributed.run \
    --local-addr "$$(address_of "$$SLURMD_NODENAME")" \
    --rdzv-conf "is_host=$$((SLURM_NODEID == 0)),read_timeout=600" "$$@"' torchrun \
    --nnodes "$$SLURM_JOB_NUM_NODES" --nproc-per-node $processes \
    --rdzv-backend c10d --rdzv-id "$$SLURM_JOB_ID" --rdzv-endpoint "$$head:$$port" \
    -m packtrain train "$$recipe" ${overrides}"output.name='$$run'" --resume &
step=$$!
trap time_is_up USR1
trap : TERM    # the steps are told as well: wait for their checkpoint
while kill -0 "$$step" 2>/dev/null; do wait "$$step" || true; done
status=0
wait "$$step" || status=$$?

state=$$(state_of_run)
echo "run $$run: $$state, step ended with status $$status"
[[ $$state == done ]] && exit 0
if again; then
    echo "queueing job $$SLURM_JOB_ID again"
    scontrol requeue "$$SLURM_JOB_ID"
fi
exit "$$status"
