"""Model-free, lossless speculative decoding for RL rollouts with verl and vLLM.

The modules beside the packages hold what all of them share: the options (`config`), what is counted
(`metrics`), the register of changes to other packages (`patches`), recorded rollouts (`trace`), policies with
recurrent layers (`recurrent`), where a group is served (`placement`), files that a command leaves (`files`),
what a record is made with (`environment`) and what the name of a sample says (`sample_names`).
May import: numpy, wrapt. They import no package of ours, and start nothing but git, for a record.
"""

__version__ = "0.1.0"
