#!/bin/bash
# One worker of areal_actors: aa-0123456789abcdef-trainer-0.2
umask 077
name=aa-0123456789abcdef-trainer-0.2
directory='/shared/my runs/sums/slurm'
restarts=${SLURM_RESTART_COUNT:-0}
step=
is_ending=0
is_warned=0

finish() {  # how it ended: status, time, node
  local record="$name.$SLURM_JOB_ID-$restarts"
  printf '%s %s %s\n' "$1" "$(date +%s)" "${SLURMD_NODENAME:-}" >"$directory/exit/.$record" &&
    mv "$directory/exit/.$record" "$directory/exit/$record"
}
trap 'is_ending=1' TERM
trap 'is_warned=1; [ -z "$step" ] || kill -USR1 "$step"' USR1

if [ -e "$directory/stop/$name" ]; then
  echo "This job was taken back before it began."
  finish 0
  exit 0
fi

module load cuda
export NOTE="$HOME"
export AREAL_BOOTSTRAP="$directory/bootstrap/$name.json"
export SRUN_CPUS_PER_TASK=4
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
srun --export=ALL \
  --nodes=2 --ntasks=4 \
  --ntasks-per-node=2 --distribution=block \
  --wait=30 --label \
  --cpus-per-task=4 \
  --mpi=none --kill-on-bad-exit=0 --unbuffered \
  /opt/py/bin/python -m areal_actors.schedulers.preflight 60.0 areal_actors.worker &
step=$!
[ "$is_warned" = 0 ] || kill -USR1 "$step"
while :; do
  wait "$step"
  status=$?
  # A trap ends the wait before the step ends.
  [ "$status" -gt 128 ] && kill -0 "$step" 2>/dev/null || break
done

finish "$status"
if [ "$status" = 75 ] && [ "$is_ending" = 0 ] && [ "$restarts" -lt 3 ] &&
  [ ! -e "$directory/stop/$name" ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
