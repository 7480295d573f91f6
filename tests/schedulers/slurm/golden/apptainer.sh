#!/bin/bash
# One worker of areal_actors: aa-0123456789abcdef-generation-1.2
umask 077
name=aa-0123456789abcdef-generation-1.2
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
srun --export=ALL \
  --nodes=1 --ntasks=1 \
  --cpus-per-task=4 \
  --mpi=none --kill-on-bad-exit=0 --unbuffered \
  apptainer exec --nv --bind /home/ada --bind '/shared/my runs/sums' --bind /data --pwd /home/ada '/images/a b.sif' /opt/py/bin/python -m areal_actors.schedulers.preflight 60.0 areal_actors.worker &
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
