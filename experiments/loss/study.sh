#!/bin/sh
# The loss study, in the order in which its answers matter. All sweeps share one folder (multirun/loss) and go on where
# they stopped, so the same command again runs only what is missing; its exit code is not 0 if a point failed.
#   sh experiments/loss/study.sh && python -m analysis.keep multirun/loss --out experiments/loss/rows && make report
failed=0
sweep() {
    python run.py -m experiment=loss "$@" || { code=$? failed=1; }
    [ "${code:-0}" -lt 128 ] || exit "$code" # a signal is meant for all of it
}

sweep                                                                       # headline arms
sweep compressor=lhc,noop seed=0                                            # the two ends
small="model=small trainer.global_batch=8 trainer.learning_rate=1e-3"
sweep $small compressor=fsdp,tagc,tagc2,packed                              # headline arms, the larger model
sweep compressor=tagc compressor.sparsity=0.95                              # the strongest setting, as it is
sweep compressor=tagc compressor.sparsity=0.95 compressor.residual_decay=0.9 compressor.warmup_steps=20
# As much time as 200 steps of fsdp take at 85.4 Mbit/s (experiments/iteration_time, cell nano-r2-fp32-reshard-5x)
sweep compressor=bf16 trainer.max_steps=233
sweep compressor=tagc2 trainer.max_steps=243
sweep compressor=packed trainer.max_steps=249
sweep compressor=tagc2 compressor.residual_decay=0.9 compressor.warmup_steps=20 trainer.max_steps=239
for seeds in 0 1,2; do
    ablate() { sweep compressor=tagc2 seed=$seeds "$@"; }
    ablate compressor.sparsity=0.6,0.9,0.95                                 # 0.8 is the default
    ablate compressor.layers='all,*.mlp.*' compressor.sparsity=0.8,0.95     # non_attention is the default
    ablate compressor.error_feedback=false
    ablate compressor.residual_decay=0.9 compressor.warmup_steps=0,20       # what may lower the loss
    ablate compressor.warmup_steps=20
    ablate compressor.threshold=lognormal,exact                             # sampled is the default
    sweep cluster.ranks=4 compressor=fsdp,tagc,tagc2,packed seed=$seeds
done
sweep trainer.max_steps=1000 compressor=fsdp,tagc2,packed seed=0            # does the difference last?
exit $failed
