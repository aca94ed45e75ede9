#!/usr/bin/env bash
# requeue.sh EXIT_CODE: put the SLURM job that calls this back into the queue if its run can be continued (75), at most
# TAGC_MAX_REQUEUES times. For the end of a batch script: trap 'slurm/requeue.sh $?' EXIT
set -uo pipefail

[[ $1 -eq 75 ]] || exit "$1"
limit=${TAGC_MAX_REQUEUES:-20}
# SLURM is asked for what the environment also says: a job that was submitted from inside another one has inherited that
# one's array and restarts. And the number of an array is also that of one of its tasks; alone it would mean all of them.
record=$(scontrol show job --oneliner "$SLURM_JOB_ID" | grep "^JobId=$SLURM_JOB_ID ")
field() { grep -oP -m1 "(?<= )$1=\K\S+" <<<" $record" | head -n1; }
array=$(field ArrayJobId) state=$(field JobState) restarts=$(field Restarts)
job=${array:+${array}_$(field ArrayTaskId)}
job=${job:-$SLURM_JOB_ID}

if [[ $state != RUNNING ]]; then # preemption may have put it back already
    echo "job $job is ${state:-unknown to scontrol}: not put back into the queue; submitted again, it continues"
    exit 75
fi
if ((restarts >= limit)); then
    echo "job $job was requeued $restarts times already (TAGC_MAX_REQUEUES); the same command submitted again continues"
    exit 75
fi
echo "job $job goes back into the queue, restart $((restarts + 1)) of at most $limit"
scontrol requeue "$job"
