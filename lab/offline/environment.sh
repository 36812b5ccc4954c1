# . environment.sh: what every command there needs. SITE: where unpack.sh has put the packages.
export PYTHONPATH=${SITE:-/tmp/site} PYTHONUNBUFFERED=1
# The checkout has no compiled module; it must not stand before the packages.
export PYTHONSAFEPATH=1
# FlashInfer is not packed, and vLLM's sampler would take it.
export VLLM_USE_FLASHINFER_SAMPLER=0
# Nothing outside the machine can be reached, and no other interface is needed.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo
