#!/usr/bin/env bash
# The flags that put slime's rollouts into our hands. Everything else of your command line stays as it is:
#
#     source examples/slime_flags.sh
#     python train.py "${YOUR_ARGS[@]}" "${LIFECYCLE_ARGS[@]}"
#
# Both packages must be importable where slime's RolloutManager runs (`pip install rollout-lifecycle` there).

# Our settings are attributes of slime's args, read from the YAML file of --custom-config-path.
cat > lifecycle.yaml <<'YAML'
lifecycle_log: lifecycle.jsonl          # one line per transition: `lifecycle report lifecycle.jsonl`
lifecycle_abort_timeout: 10             # seconds a server may take to confirm an abort
lifecycle_max_staleness: null           # in weight versions; older prefixes begin again at the prompt
lifecycle_mask_off_policy: true         # loss mask 0 for tokens older than the newest of their own sample
YAML

LIFECYCLE_ARGS=(
   # A whole step: refill, rewards, filters, over-sampling; what is left is kept and delivered first next time.
   --rollout-function-path adapters.slime.generate_rollout
   # Single samples: used by evaluation, and by slime's own or its fully asynchronous rollout function.
   --custom-generate-function-path adapters.slime.generate
   # Checkpoints hold the partial groups beside the cursor of the data set.
   --data-source-path adapters.slime.DataSource
   --custom-config-path lifecycle.yaml

   --partial-rollout                     # aborted samples keep their tokens
   --rollout-batch-size 32
   --over-sampling-batch-size 48
   --n-samples-per-prompt 8
)

# With slime's own rollout function (leave --rollout-function-path out) groups with a failed sample must not be trained on:
#   --dynamic-sampling-filter-path adapters.slime.keep_whole
# and slime's --mask-offpolicy-in-partial-rollout must stay off: it masks finished siblings too.
