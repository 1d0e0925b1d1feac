"""All mutants."""

from tests.mutants.adapter_faults import ADAPTER_FAULTS
from tests.mutants.attention_faults import ATTENTION_FAULTS
from tests.mutants.block_faults import BLOCK_FAULTS
from tests.mutants.constraint_faults import CONSTRAINT_FAULTS
from tests.mutants.cut_faults import CUT_FAULTS
from tests.mutants.data_faults import DATA_FAULTS
from tests.mutants.distill_faults import DISTILL_FAULTS
from tests.mutants.eagle_faults import EAGLE_FAULTS
from tests.mutants.ending_faults import ENDING_FAULTS
from tests.mutants.engine_faults import ENGINE_FAULTS
from tests.mutants.expert_faults import EXPERT_FAULTS
from tests.mutants.float8_faults import FLOAT8_FAULTS
from tests.mutants.format_faults import FORMAT_FAULTS
from tests.mutants.host_faults import HOST_FAULTS
from tests.mutants.interplay_faults import INTERPLAY_FAULTS
from tests.mutants.kernel_faults import KERNEL_FAULTS
from tests.mutants.latent_faults import LATENT_FAULTS
from tests.mutants.launch_faults import LAUNCH_FAULTS
from tests.mutants.layer_faults import LAYER_FAULTS
from tests.mutants.lease_faults import LEASE_FAULTS
from tests.mutants.mamba_faults import MAMBA_FAULTS
from tests.mutants.model_faults import MODEL_FAULTS
from tests.mutants.mtp_faults import MTP_FAULTS
from tests.mutants.mutant import Mutant
from tests.mutants.ngram_faults import NGRAM_FAULTS
from tests.mutants.policy_faults import POLICY_FAULTS
from tests.mutants.processing_faults import PROCESSING_FAULTS
from tests.mutants.recurrent_faults import RECURRENT_FAULTS
from tests.mutants.round_faults import ROUND_FAULTS
from tests.mutants.sampling_faults import SAMPLING_FAULTS
from tests.mutants.score_faults import SCORE_FAULTS
from tests.mutants.skipping_faults import SKIPPING_FAULTS
from tests.mutants.stats_faults import STATS_FAULTS
from tests.mutants.storage_faults import STORAGE_FAULTS
from tests.mutants.window_faults import WINDOW_FAULTS

MUTANTS: tuple[Mutant, ...] = (
    *SAMPLING_FAULTS,
    *ENGINE_FAULTS,
    *POLICY_FAULTS,
    *ADAPTER_FAULTS,
    *ATTENTION_FAULTS,
    *CONSTRAINT_FAULTS,
    *LEASE_FAULTS,
    *CUT_FAULTS,
    *DATA_FAULTS,
    *STATS_FAULTS,
    *DISTILL_FAULTS,
    *BLOCK_FAULTS,
    *EAGLE_FAULTS,
    *MTP_FAULTS,
    *EXPERT_FAULTS,
    *FLOAT8_FAULTS,
    *FORMAT_FAULTS,
    *HOST_FAULTS,
    *INTERPLAY_FAULTS,
    *KERNEL_FAULTS,
    *LATENT_FAULTS,
    *LAUNCH_FAULTS,
    *LAYER_FAULTS,
    *NGRAM_FAULTS,
    *RECURRENT_FAULTS,
    *MAMBA_FAULTS,
    *MODEL_FAULTS,
    *PROCESSING_FAULTS,
    *SKIPPING_FAULTS,
    *ROUND_FAULTS,
    *SCORE_FAULTS,
    *ENDING_FAULTS,
    *STORAGE_FAULTS,
    *WINDOW_FAULTS,
)
