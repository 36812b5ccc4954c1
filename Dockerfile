# verl's image for vLLM with rollout_spec in it: docker build -t verl-rollout-spec .
ARG IMAGE=verlai/verl:vllm024.latest
FROM ${IMAGE}
COPY pyproject.toml setup.py MANIFEST.in README.md LICENSE CHANGELOG.md /opt/rollout_spec/
COPY native /opt/rollout_spec/native
COPY configs /opt/rollout_spec/configs
COPY rollout_spec /opt/rollout_spec/rollout_spec
RUN python3 -m pip install --no-cache-dir "/opt/rollout_spec[report]"
RUN rollout-spec --version && python3 -c "import rollout_spec.drafting.native"
