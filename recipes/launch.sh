# Sourced by the recipes' run.sh: launch RECIPE [SIZE [DEVICE]] [HYDRA OVERRIDES...]
launch() {
    local recipe=$1 size=cpu device= here
    shift
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    if [[ $# -gt 0 && $1 != *=* && $1 != [+~]* ]]; then size=$1; shift; fi
    if [[ $# -gt 0 && $1 != *=* && $1 != [+~]* ]]; then device=$1; shift; fi
    [[ $size == cpu || -f $here/../configs/rollout_spec_size/$size.yaml ]] || fail "size '$size': must be cpu, qwen3_8b, qwen3_32b or qwen3_235b"
    [[ $size != cpu || -z $device ]] || fail "device '$device': size cpu takes none"
    device=${device:-gpu}
    [[ $device == gpu || $device == npu ]] || fail "device '$device': must be gpu or npu"
    # Without byte code every process of the run compiles its imports again.
    unset PYTHONDONTWRITEBYTECODE
    if [[ $size == cpu ]]; then
        python -c 'import importlib.util, sys; sys.exit(not importlib.util.find_spec("rollout_spec_lab"))' ||
            fail "size cpu needs the laboratory: pip install ./lab"
        export ROLLOUT_SPEC_DEMO_DIR=${ROLLOUT_SPEC_DEMO_DIR:-$PWD/outputs/demo}
        export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$ROLLOUT_SPEC_DEMO_DIR/metrics.jsonl}
        export WANDB_MODE=${WANDB_MODE:-offline}
        python -m rollout_spec_lab.demo.prepare_worker files "$ROLLOUT_SPEC_DEMO_DIR"
        exec python -m verl.trainer.main_ppo --config-path "$here" --config-name cpu \
            rollout_spec_demo="[cpu,$recipe]" "$@"
    fi
    local data=${ROLLOUT_SPEC_DATA_DIR:-$PWD/data/$recipe}
    export VERL_FILE_LOGGER_PATH=${VERL_FILE_LOGGER_PATH:-$PWD/outputs/$recipe-$size/metrics.jsonl}
    mkdir -p "$(dirname "$VERL_FILE_LOGGER_PATH")"
    [[ -f $data/train.parquet ]] ||
        fail "$data/train.parquet: not found; make it: python recipes/$recipe/prepare.py"
    # The processes of a Ray that runs already do not have this shell's variables.
    local given=("data.train_files='$data/train.parquet'" "data.val_files='$data/val.parquet'")
    [[ -z ${MODEL_PATH:-} ]] || given+=("actor_rollout_ref.model.path='$MODEL_PATH'")
    given+=("+ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH='$VERL_FILE_LOGGER_PATH'")
    exec python -m verl.trainer.main_ppo --config-path "$here" --config-name train \
        rollout_spec_recipe="$recipe" rollout_spec_size="$size" rollout_spec_device="$device" "${given[@]}" "$@"
}

fail() {
    echo "run.sh: $*" >&2
    exit 2
}
