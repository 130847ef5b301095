#!/usr/bin/env bash
# sbatch cluster/slurm.sh tuned_examples/alfworld_gigpo.py --model=qwen2.5-7b --engine=vllm \
#   --num-engines=4 --num-env-runners=4 --num-learners=4 --results /shared/runs/alfworld_7b
#SBATCH --job-name=gigpo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
set -euo pipefail

port=6379
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname --ip-address | awk '{print $1}'):$port

# --block keeps Ray in the step's own processes, which end with the job.
srun --overlap --nodes=1 --ntasks=1 -w "$head" \
  ray start --head --block --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus=4 &
sleep 15
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --overlap --nodes=$((SLURM_JOB_NUM_NODES - 1)) --ntasks-per-node=1 --exclude="$head" \
    ray start --block --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus=4 &
  sleep 15
fi

RAY_ADDRESS=$address srun --overlap --nodes=1 --ntasks=1 -w "$head" python "$@"
