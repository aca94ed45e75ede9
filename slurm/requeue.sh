#!/usr/bin/env bash
# requeue.sh EXIT_CODE: put the SLURM job that calls this back into the queue if its run can be continued (75), at most
# TAGC_MAX_REQUEUES times. For the end of a batch script: trap 'slurm/requeue.sh $?' EXIT
set -uo pipefail

limit=${TAGC_MAX_REQUEUES:-20}
restarts=${SLURM_RESTART_COUNT:-0}
job=$SLURM_JOB_ID
# The number of an array is also that of one of its tasks; alone it would mean all of them.
[[ -z ${SLURM_ARRAY_JOB_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID

[[ $1 -eq 75 ]] || exit "$1"
if ((restarts >= limit)); then
    echo "job $job was requeued $restarts times already (TAGC_MAX_REQUEUES); the same command submitted again continues"
    exit 75
fi
# Preemption may have put it back already.
[[ $(squeue --noheader --jobs "$job" --format %T) == RUNNING ]] || exit 75
echo "job $job goes back into the queue, restart $((restarts + 1)) of at most $limit"
scontrol requeue "$job"
