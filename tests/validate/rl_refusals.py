"""Settings of reinforcement learning that validation refuses, with the message."""

RL = "data.kind=task rl.group_size=4"
REINFORCEMENT = {
    "rl.group_size=4": (
        "rl.group_size=4 samples rollouts of prompts, and data.kind='python-docs' has none; choose data.kind='task' or "
        "'prompts', or rl.group_size=0"
    ),
    "data.kind=prompts": (
        "data.kind='prompts' has no answers to train on; set rl.group_size above 0, or choose data.kind='sft'"
    ),
    "data.kind=prompts rl.group_size=4": (
        "reward.use='' must name the reward of data.kind='prompts': exact, number, sort, countdown, or FILE.py:FUNCTION"
    ),
    f"{RL} train.global_batch_size=6": (
        "train.global_batch_size=6 must be a multiple of rl.group_size=4: it counts rollouts; choose group_size ..."
    ),
    f"{RL} rl.updates=2": (
        "rl.updates=2 trains on rollouts of older weights, which rl.objective='policy' does not correct for; choose "
        "objective 'cispo', 'clip' or 'sequence', or updates=1"
    ),
    f"{RL} rl.updates=3 rl.objective=clip run.steps=9": (
        "checkpoint.every=500 must be a multiple of rl.updates=3: rollouts that are not trained on yet are not saved; "
        "choose 498 or 501"
    ),
    f'{RL} reward.use=["a.py:f","exact","exact"]': (
        "reward.use=['a.py:f', 'exact', 'exact'] names 'exact' twice; name it once, and set its share by reward.weights"
    ),
    f'{RL} reward.use=["exact",""]': "reward.use=['exact', ''] has an empty name; leave it out",
    f'{RL} reward.use=["a.py:f","exact"] reward.weights=[1]': (
        "reward.weights=[1.0] must have one number for each of the 2 reward functions of reward.use; list as many, or "
        "leave weights out for 1 each"
    ),
    f'{RL} reward.use=["a.py:f","exact"] reward.weights=[0,0]': (
        "reward.weights=[0.0, 0.0] makes every reward 0; set one of them to another number"
    ),
    f"{RL} reward.use=reward.py:reward reward.timeout_s=600": (
        "reward.timeout_s=600.0 must be less than faults.timeout_s=600.0, after which the other ranks end the run; "
        "lower it, or raise faults.timeout_s"
    ),
    f"{RL} run.steps=3 checkpoint.every=0 rl.updates=4 rl.objective=clip": (
        "run.steps=3 must be a multiple of rl.updates=4: rollouts that are not trained on yet are not saved; choose 4"
    ),
    f"{RL} rl.objective=clip rl.correction=clamp": (
        "rl.objective='clip' with rl.correction='clamp' compares with the weights at the start of a round, which are "
        "those that rl.updates=1 trains, so every ratio is 1; choose objective 'policy', or updates above 1"
    ),
    f"{RL} rl.objective=clip rl.updates=2 rl.replay=on model.ffn.moe.router.expert_bias=true "
    "model.ffn.moe.router=sigmoid": (
        "rl.replay='on' with rl.updates=2 would update the expert bias by choices of older weights "
        "(moe.bias_update_rate=0.001); set bias_update_rate=0, updates=1, or replay='off'"
    ),
    f"{RL} rl.objective=clip rl.staleness=1 rl.replay=on": (
        "rl.replay='on' is incompatible with rl.staleness=1: rollouts that wait for training keep no expert choices; "
        "set replay='auto' (off here), or staleness=0"
    ),
    f"{RL} rollout.ranks=2": (
        "rollout.ranks=2 would wait for each training step, and the other ranks for each round of rollouts: "
        "rl.staleness=0 trains on rollouts of the newest weights; set rl.staleness=1 or more, or rollout.ranks=0"
    ),
    f"{RL} rl.staleness=1": (
        "rl.staleness=1 trains on rollouts of older weights, which rl.objective='policy' does not correct for; choose "
        "objective 'cispo', 'clip' or 'sequence', or staleness=0"
    ),
    f"{RL} rl.staleness=3 rl.updates=2 rl.objective=clip": (
        "rl.staleness=3 must be a multiple of rl.updates=2: it counts optimizer steps, and rounds of rollouts are "
        "whole; choose 2 or 4"
    ),
    f"{RL} rl.staleness=2 rl.updates=2 rl.objective=clip rl.correction=clamp": (
        "rl.correction='clamp' needs log-probabilities of the weights that sampled, by the training forward pass, and "
        "with rl.staleness=2 these weights are trained further by then; set correction='none' (objective 'clip' or "
        "'cispo' bounds the ratio to the sampler), or staleness=0"
    ),
    f"{RL} rl.staleness=1 rl.objective=clip rollout.ranks=1 parallel.elastic=true": (
        "rollout.ranks=1 is incompatible with parallel.elastic=true, which gives every process of the launcher to "
        "training; set elastic=false"
    ),
    f"{RL} rl.staleness=1 rl.objective=clip rollout.ranks=3 rollout.tp=2": (
        "rollouts cannot be sampled under tp=2 pp=1 ep=1 etp=1: ..."
    ),
    f"{RL} rl.length_penalty_from=64": (
        "rl.length_penalty_from=64 must be below rollout.max_tokens=64, where the reward has fallen by 1; choose 0 "
        "(none) to 63"
    ),
    f"{RL} rl.kl=0.1 rl.reset_patience=2": (
        "rl.reset_patience=2 counts evaluations, and train.eval_every=0 makes none; set eval_every, or reset_patience=0"
    ),
    f"{RL} rollout.pass_tokens=128": (
        "rollout.pass_tokens=128 must be at least rollout.slots=256: each rollout adds one token to a pass; choose "
        "fewer slots or more tokens"
    ),
    f"{RL} parallel.world_size=4 rollout.experts=fetch": (
        "rollout.experts='fetch' has no effect with ep=1: each rank holds all experts; set rollout.ep above 1, or "
        "leave it out"
    ),
    f"{RL} parallel.world_size=4 parallel.tp=2 parallel.ep=4 rollout.experts=fetch": (
        "rollout.experts='fetch' reads whole experts for whole tokens, and tp=2 splits them; set rollout.tp=1, or "
        "choose 'exchange'"
    ),
    f"{RL} parallel.world_size=4 parallel.etp=2 parallel.ep=2 rollout.experts=fetch": (
        "rollout.experts='fetch' reads whole experts for whole tokens, and etp=2 splits them; set rollout.etp=1, or "
        "choose 'exchange'"
    ),
    f"{RL} parallel.world_size=4 parallel.ep=4 rollout.experts=whole rollout.ep=2": (
        "rollout.ep=2 splits the experts, and rollout.experts='whole' holds all of them on each rank; leave ep out, or "
        "choose rollout.experts='exchange'"
    ),
    f"{RL} moe.choice=sinkhorn": (
        "moe.choice='sinkhorn' is incompatible with reinforcement learning: a token's experts would then depend on "
        "other tokens, and sampling sees other tokens; choose 'topk', or rl.group_size=0"
    ),
    f"{RL} moe.capacity_factor=1.0": "moe.capacity_factor=1.0 is incompatible with reinforcement learning: ...",
    f"{RL} train.eval_every=2 moe.eval_capacity_factor=1.0": (
        "moe.eval_capacity_factor=1.0 is incompatible with reinforcement learning: ..."
    ),
    f"{RL} moe.input_jitter=0.1": "moe.input_jitter=0.1 is incompatible with reinforcement learning: ...",
    f"{RL} model.ffn.moe.router.softmax=sparsemixer": (
        "model.ffn.moe.router.softmax.samples=true is incompatible with reinforcement learning: training would sample "
        "other "
        "experts than rollouts have; set model.ffn.moe.router.softmax.samples=false, or rl.group_size=0"
    ),
    f"{RL} moe.trace_every=2": "moe.trace_every=2 is incompatible with reinforcement learning: ...",
    f"{RL} model.mtp_layers=1": "model.mtp_layers=1 is incompatible with reinforcement learning: ...",
}
