"""The catalogue: what a failure looks like in a log, what causes it, what cures it, and where that is discussed.

To add one: put it where it belongs by how specific it is (of two that match one line, the first in the catalogue
counts), and a short log into `tests/unit/diagnosis/logs/`, named after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Frame = Literal["raised", "user code"]


@dataclass(frozen=True)
class Signature:
    """A known way to fail.

    Args:
        name: short, for people and for `--json`.
        pattern: regular expression that one line has to contain. Its named groups can be used in `cause` and `cure`.
        cause: what went wrong, in one or two sentences.
        cure: what to do, the likeliest first.
        link: a public report or document on it; empty where the log's own text says all.
        near: expression that a line up to 200 before or 100 after has to contain, where the line alone would not do.
        before: expression that some earlier line of the log has to contain.
        frame: which frame decides: where the error was raised, or, under Dynamo, the last line of the traced code.
        general: it gives way to anything else that the same traceback, or the text of its exception, shows.
        symptom: it follows from a failure elsewhere, and names no cause. It never counts as one.
    """

    name: str
    pattern: str
    cause: str
    cure: str
    link: str
    near: str = ""
    before: str = ""
    frame: Frame = "raised"
    general: bool = False
    symptom: bool = False


_SGLANG = "https://github.com/sgl-project/sglang"
_FLASHINFER = "https://github.com/flashinfer-ai/flashinfer"
_CAPTURE = (
    r"[Cc]apture .{0,40}graph|graph_runner\.py|graph_backend|piecewise_backend\.py|torch\.cuda\.graph|capture_begin"
)

CATALOGUE = (
    # --- this layer, and the command line ---
    Signature(
        name="glm5-plugins refused",
        pattern=r"^glm5-plugins: (?P<what>.+)",
        cause="glm5-plugins stopped the launch: {what}",
        cure="{next}",
        link="",
    ),
    Signature(
        name="a plugin raised",
        pattern=r"glm5_plugins\.errors\.PluginError: (?P<what>The plugin '(?P<plugin>[^']+)' failed.*)",
        cause="{what}",
        cure="Take {plugin!r} out of GLM5_PLUGINS to start without it; its traceback is in the log.",
        link="",
    ),
    Signature(
        name="unknown flag",
        pattern=r"error: unrecognized arguments: (?P<flags>.+)",
        cause="This SGLang does not know {flags}.",
        cure="Flags come and go with versions (--nsa-* became --dsa-* in 0.5.13 and left in 0.5.20): "
        "compare with `python -m sglang.launch_server --help`.",
        link="https://docs.sglang.io/advanced_features/server_arguments.html",
    ),
    Signature(
        name="ambiguous flag",
        pattern=r"error: ambiguous option: (?P<flag>\S+) could match (?P<flags>.+)",
        cause="{flag} is no flag of this SGLang, but the start of several: {flags}.",
        cure="Write the one that is meant in full (--cuda-graph-max-bs became --cuda-graph-max-bs-decode in 0.5.14 "
        "and left in 0.5.20).",
        link="https://docs.sglang.io/advanced_features/server_arguments.html",
    ),
    Signature(
        name="a required flag is missing",
        pattern=r"error: the following arguments are required: (?P<flags>.+)",
        cause="The command line lacks {flags}.",
        cure="Add it; if it is there, look for a line above it that ends otherwise than in a backslash.",
        link="https://docs.sglang.io/advanced_features/server_arguments.html",
    ),
    Signature(
        name="value not allowed for a flag",
        pattern=r"error: argument (?P<flag>[^:]+): (?P<what>(?:invalid|expected|not allowed).+)",
        cause="SGLang does not take this value for {flag}: {what}",
        cure="Choose one of the values in the message; values come and go with versions "
        "(--fp4-gemm-backend cutlass left in 0.5.16).",
        link="https://docs.sglang.io/advanced_features/server_arguments.html",
    ),
    Signature(
        name="port in use",
        pattern=r"\[Errno 98\].*(?:address already in use|Address already in use)|Address already in use|"
        r"[Pp]ort \d+ (?:is )?(?:already )?(?:in use|not available)|port is already allocated",
        cause="Another process listens on the port the server wants.",
        cure="Stop that process, or choose another --port (0.5.12 and later also want that port + 10000 for gRPC).",
        link="https://docs.sglang.io/advanced_features/server_arguments.html",
    ),
    Signature(
        name="Docker did not start the container",
        pattern=r"Error response from daemon: (?P<what>.+)",
        cause="Docker did not start the container: {what}",
        cure="The message says what is amiss; `could not select device driver` wants NVIDIA's Container Toolkit, and "
        "Docker restarted after it.",
        link="https://docs.nvidia.com/datacenter/cloud-native/container-toolkit/latest/install-guide.html",
    ),
    # --- what Dynamo stops at ---
    Signature(
        name="compiler.disable under fullgraph",
        pattern=r"Skip calling `torch\.compiler\.disable\(\)`'?d function",
        cause="A function is kept out of torch.compile (`torch.compiler.disable`) inside a region that is compiled "
        "with fullgraph=True; the two exclude each other by design.",
        cure="Make the function a torch operator instead (GLM5_PLUGINS=fp4_custom_op), or use the breakable prefill "
        "graph: --enable-breakable-cuda-graph on 0.5.11-0.5.13, --cuda-graph-backend-prefill breakable from 0.5.14.",
        link="https://github.com/pytorch/pytorch/issues/167927",
        frame="user code",
    ),
    Signature(
        name="Dynamo cannot trace a JIT loader",
        pattern=r"(?:torch\._dynamo\.exc\.)?Unsupported: (?P<what>.+)",
        near=r'File ".*flashinfer/(?:jit/|compilation_context|utils\.py)|allocate_lock|get_cuda_version|build_and_load',
        cause="The prefill graph is compiled with fullgraph=True, and FlashInfer loads its kernels inside the call: "
        "Dynamo walks into the loader and stops ({what}).",
        cure="GLM5_PLUGINS=fp4_custom_op puts an operator around it (warm-up alone does not help: Dynamo ignores "
        "functools.cache), or use the breakable prefill graph: --enable-breakable-cuda-graph on 0.5.11-0.5.13, "
        "--cuda-graph-backend-prefill breakable from 0.5.14.",
        link=f"{_SGLANG}/issues/23386",
        frame="user code",
    ),
    Signature(
        name="Dynamo cannot trace",
        pattern=r"torch\._dynamo\.exc\.(?:Unsupported|InternalTorchDynamoError|UserError|FailOnRecompileLimitHit)"
        r"(?:: (?P<what>.+))?",
        cause="torch.compile met code that it cannot trace, and the graph may not be broken: {what}",
        cure="Do without the compiled prefill graph: --disable-piecewise-cuda-graph up to 0.5.13, "
        "--cuda-graph-backend-prefill breakable from 0.5.14.",
        link=f"{_SGLANG}/pull/10062",
        frame="user code",
    ),
    # --- kernels that this GPU or this toolkit does not have ---
    Signature(
        name="DeepGEMM lacks this GPU",
        pattern=r"Assertion error \(.*(?:deep_?gemm|layout\.hpp|hyperconnection\.hpp|apis/).*\): "
        r"(?P<what>Unsupported arch\w*|Unknown recipe)",
        cause="DeepGEMM has no kernels for this GPU ({what}): before sgl-deep-gemm 0.1.5 it serves SM90 and "
        "SM100 alone, and RTX PRO 6000 is SM120.",
        cure="SGLANG_ENABLE_JIT_DEEPGEMM=0, and for GLM-5's sparse attention on SM120 an SGLang whose "
        "--dsa-prefill-backend and --dsa-decode-backend have flashinfer_sparse_mla.",
        link=f"{_SGLANG}/issues/26087",
    ),
    Signature(
        name="attention kernel lacks this GPU",
        pattern=r"(?:TllmGenFmhaRunner.*Unsupported arch|"
        r"(?P<what>(?:Sparse Attention Forward Kernel|FlashAttention v\d Backend|TRTLLM \w+ backend|XQA\w{0,40}).{0,30}"
        r"(?:is only supported on|requires) .+))",
        cause="The attention backend has no kernel for this GPU. {what}",
        cure="Choose another --attention-backend (on SM120: flashinfer; for GLM-5's sparse attention "
        "--dsa-prefill-backend and --dsa-decode-backend flashinfer_sparse_mla, where this SGLang has them).",
        link=f"{_SGLANG}/issues/40558",
    ),
    Signature(
        name="a Triton kernel needs more shared memory",
        pattern=r"OutOfResources: out of resource: shared memory, Required: (?P<want>\d+), "
        r"Hardware limit: (?P<have>\d+)",
        cause="A Triton kernel wants {want} bytes of shared memory for a block, and this GPU has {have} (SM120: "
        "101376); its blocks were chosen for larger GPUs.",
        cure="The traceback's last line of SGLang names the kernel. For the experts in FP8, SGLang 0.5.14 or newer has "
        "smaller blocks; for others of the experts, a configuration tuned on this GPU does "
        "(benchmark/kernels/fused_moe_triton in SGLang's source).",
        link=f"{_SGLANG}/issues/8513",
    ),
    Signature(
        name="a TileLang kernel needs more shared memory",
        pattern=r"Failed to set the allowed dynamic shared memory size to (?P<want>\d+)",
        cause="A TileLang kernel wants {want} bytes of shared memory for a block, more than this GPU has (SM120: "
        "101376). On SM120 the sparse attention of --dsa-prefill-backend and --dsa-decode-backend tilelang does.",
        cure="For GLM-5 to GLM-5.2 flashinfer_sparse_mla instead, from SGLang 0.5.17. It refuses GLM-5.3-Flash, for "
        "which the report tells of smaller tiles in SGLang's source (block_I 32, num_stages 1, threads 128).",
        link=f"{_SGLANG}/issues/37105",
    ),
    Signature(
        name="a CUTLASS MoE kernel does not start",
        pattern=r"Failed to initialize cutlass TMA WS grouped gemm",
        cause="A CUTLASS kernel of FlashInfer's MoE could not start; on SM120 because its tiles want more than the 99 "
        "KiB of shared memory that a block has there.",
        cure="FlashInfer's autotuner passes over such kernels: do without --disable-flashinfer-autotune. Nothing else "
        "is known to help; the report has what was tried.",
        link=f"{_FLASHINFER}/issues/2723",
    ),
    Signature(
        name="no kernel image for this GPU",
        pattern=r"no kernel image is available for execution on the device",
        cause="A compiled package (torch, sgl-kernel, FlashInfer) was built without this GPU's architecture.",
        cure="Install builds for CUDA 12.8 or newer, which know Blackwell (cu128, cu130); "
        "`python -m sglang.check_env` shows what is installed.",
        link=f"{_SGLANG}/issues/24302",
    ),
    Signature(
        name="Triton's ptxas is too old for this GPU",
        pattern=r"ptxas fatal\s*: Value '(?P<arch>sm_\w+)' is not defined",
        cause="The ptxas that Triton brings does not know {arch}.",
        cure="TRITON_PTXAS_PATH=/usr/local/cuda/bin/ptxas, from CUDA 12.8 or newer (13.0 for sm_121).",
        link="https://github.com/triton-lang/triton/issues/8539",
    ),
    Signature(
        name="nvcc is too old for this GPU",
        pattern=r"nvcc fatal\s*: Unsupported gpu architecture '(?P<arch>\w+)'",
        cause="The nvcc that builds kernels at run time does not know {arch}.",
        cure="Put an nvcc of CUDA 12.8 or newer (12.9 for f-architectures) first in PATH, or set CUDA_HOME to it.",
        link=f"{_FLASHINFER}/issues/1658",
    ),
    Signature(
        name="nvcc is missing",
        pattern=r"Could not find nvcc|No such file or directory: 'which'|"
        r"No such file or directory: '(?:[^']*/)?nvcc'|nvcc: (?:command )?not found|"
        r"CUDA_HOME environment variable is not set",
        cause="Kernels are to be built at run time, and there is no CUDA compiler.",
        cure="Install the CUDA toolkit of torch's CUDA version and set CUDA_HOME, or install the prebuilt kernels "
        "(flashinfer-jit-cache, flashinfer-cubin) of exactly FlashInfer's version.",
        link=f"{_FLASHINFER}/issues/1904",
    ),
    Signature(
        name="ninja is missing",
        pattern=r"No such file or directory: '(?:[^']*/)?ninja'|Ninja is required to load C\+\+ extensions|"
        r"ninja: (?:command )?not found",
        cause="Kernels are to be built at run time, and `ninja` is not in PATH (a virtual environment that is used "
        "without being activated has it, but not in PATH).",
        cure="pip install ninja, and put the environment's bin folder in PATH.",
        link=f"{_FLASHINFER}/pull/3386",
    ),
    Signature(
        name="a header is missing in a kernel build",
        pattern=r"fatal error: (?P<header>[\w./+-]+\.(?:h|hpp|cuh)): No such file or directory",
        cause="A kernel build does not find {header}.",
        cure="Install the CUDA toolkit whole, or put the headers of the nvidia-* wheels on "
        "CPLUS_INCLUDE_PATH (site-packages/nvidia/*/include).",
        link=f"{_FLASHINFER}/issues/4410",
    ),
    Signature(
        name="a kernel build ran out of memory",
        pattern=r"(?:c\+\+|g\+\+|nvcc|cc1plus|cicc|ptxas).{0,80}(?:Killed|terminated with signal 9|status 137)",
        cause="The kernel build was killed, as a rule because too many compilers ran at once for the host's memory.",
        cure="Set MAX_JOBS=4 (or less) and start again: what was built is kept.",
        link=f"{_FLASHINFER}/issues/4410",
    ),
    Signature(
        name="a kernel build failed",
        pattern=r"Ninja build failed|ninja: build stopped|Error compiling objects for extension",
        cause="Building a kernel at run time failed; the compiler's own message stands above this line.",
        cure="Read the first `error:` above; a half-written cache is mended by removing the module's folder in "
        "~/.cache/flashinfer.",
        link=f"{_FLASHINFER}/issues/4410",
        general=True,
    ),
    # --- packages that do not fit together ---
    Signature(
        name="FlashInfer's parts do not match",
        pattern=r"(?P<part>flashinfer-(?:cubin|jit-cache)) version \((?P<theirs>[^)]+)\) does not match flashinfer "
        r"version \((?P<ours>[^)]+)\)",
        cause="{part} is {theirs}, flashinfer-python is {ours}.",
        cure="Install {part} of the same version, or uninstall it.",
        link=f"{_FLASHINFER}/issues/4781",
    ),
    Signature(
        name="a package is too old for this SGLang",
        pattern=r"(?<![\w.-])(?P<package>[\w.-]+) is installed with version (?P<have>\S+), which is less than the "
        r"minimum required version (?P<want>\S+?)\.(?:\s|$)",
        cause="{package} is {have}; this SGLang wants {want} or newer.",
        cure="Install {package} {want}, and see what downgraded it: SGLang pins its dependencies exactly.",
        link="https://docs.sglang.io/get_started/install.html",
    ),
    Signature(
        name="sgl-kernel does not load",
        pattern=r"sgl[-_]kernel.{0,20}CRITICAL: Could not load any common_ops|common_ops.*undefined symbol",
        cause="sgl-kernel was built for another torch, CUDA or GPU than this one.",
        cure="Install torch and sglang-kernel in exactly the versions that SGLang pins; `undefined symbol` means "
        "another torch, a missing libnvrtc or libcudart another CUDA.",
        link=f"{_SGLANG}/issues/18203",
    ),
    Signature(
        name="a shared library is missing",
        pattern=r"(?:ImportError|OSError): (?P<library>lib[\w.+-]+\.so[\w.]*): cannot open shared object file",
        cause="{library} is not found; a wheel was built for another CUDA than the one installed, or a system package "
        "is missing.",
        cure="Install the package that has {library} (libnuma: libnuma1; libnvrtc and libcudart: the nvidia-* wheels "
        "of torch's CUDA version).",
        link=f"{_SGLANG}/issues/16052",
    ),
    Signature(
        name="a Python module is missing",
        pattern=r"ModuleNotFoundError: No module named '(?P<module>[^']+)'|"
        r"python[\d.]*: No module named (?P<run>[\w.]+)",
        cause="The Python module '{module}{run}' is not installed in the server's environment.",
        cure="Install it there, or start that environment's own python. vllm is asked for where SGLang finds no GPU "
        "kernels: then SGLang does not see your GPU (on a CPU: SGLANG_USE_CPU_ENGINE=1).",
        link="https://docs.sglang.io/get_started/install.html",
    ),
    Signature(
        name="transformers does not know the model",
        pattern=r"has model type `(?P<model>[^`]+)` but Transformers does not recognize this architecture",
        cause="The installed transformers does not know the model type {model}.",
        cure="Use the transformers version that SGLang pins; where that one is too old, a newer SGLang.",
        link="https://docs.sglang.io/get_started/install.html",
    ),
    Signature(
        name="SGLang does not know the model",
        pattern=r"Model architectures (?P<model>\[[^\]]*\]) are not supported for now|"
        r"Cannot find model module\. (?P<other>'[^']+') is not a registered model",
        cause="This SGLang has no model {model}{other}, or its file failed to import (then `Ignore import error` "
        "stands above).",
        cure="Upgrade SGLang: GlmMoeDsaForCausalLM (GLM-5) needs 0.5.9 or newer.",
        link=f"{_SGLANG}/issues/5441",
    ),
    # --- the model's files ---
    Signature(
        name="the model is not there",
        pattern=r"(?:(?<!\S)(?P<model>\S+) is not a local folder and is not a valid model identifier|"
        r"Repo id must be in the form .*: '(?P<path>/[^']*)'|"
        r"Repository Not Found for url|Can't load the configuration of|Cannot access gated repo|We couldn't connect to '?https://huggingface)",
        cause="The model is neither a local folder nor reachable on the hub. {model}{path}",
        cure="Check --model-path (inside the container), HF_TOKEN for gated models, and HF_HUB_OFFLINE.",
        link="https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables",
    ),
    Signature(
        name="a weight file is broken",
        pattern=r"SafetensorError|HeaderTooLarge|InvalidHeaderDeserialization|MetadataIncompleteBuffer|"
        r"invalid load key, 'v'",
        cause="A weight file is cut off, or is a Git LFS pointer rather than the file.",
        cure="Compare sizes with the hub and download the files anew (`git lfs pull`, `hf download`).",
        link="https://huggingface.co/docs/safetensors/index",
    ),
    Signature(
        name="shared experts are stored otherwise",
        pattern=r"The size of tensor a \((?P<a>\d+)\) must match the size of tensor b \((?P<b>\d+)\)",
        near=r"shared_expert|load_weights|weight_loader",
        cause="While loading weights a tensor of {b} was to go into one of {a}: SGLang fuses the shared expert into "
        "the FP4 experts, and this checkpoint keeps it apart in BF16.",
        cure="--disable-shared-experts-fusion.",
        link="https://github.com/SemiAnalysisAI/InferenceX/pull/2335",
    ),
    # --- numbers ---
    Signature(
        name="NaN in the probabilities",
        pattern=r"probability tensor contains either `?inf`?, `?nan`? or element < 0|"
        r"Detected errors during sampling! NaN in the (?:logits|prob)|ValueError: .*NaN in the logits",
        cause="The model computed NaN or infinity, so nothing can be sampled. With GLM-5 NVFP4 on SM120 before 0.5.17 "
        "the FP8 KV cache does that; capture across graph breaks and wrong FP4 scale layouts do, too.",
        cure="Try --kv-cache-dtype bf16, then without the prefill graph, then without the plugin added last.",
        link=f"{_SGLANG}/issues/29453",
    ),
    # --- memory ---
    Signature(
        name="out of memory: the model is loaded twice",
        pattern=r"OutOfMemoryError|CUDA out of memory|Not enough memory\. Please try to increase --mem-fraction-static",
        # The first of each: a part that has matched inside (?=(...)) is not tried again further on, so that a line as
        # long as lines of arguments are is gone through once.
        before=r"^(?=(?P<head>.*?model_path'?[=:] ?'))(?P=head)(?P<model>[^']*)'"
        r"(?=(?P<middle>.*?speculative_algorithm'?[=:] ?'(?:NEXTN|EAGLE)'))(?P=middle)"
        r".*?speculative_draft_model_path'?[=:] ?(?:None|'(?P=model)')",
        near=r"draft_worker|eagle_worker|draft_model|speculative/|is_draft_worker|NextN",
        cause="Speculative decoding without a draft model of its own loads the main model a second time as the draft.",
        cure="SGLANG_ENABLE_SPEC_V2=True where this version still has that switch (the MTP layer alone is loaded), "
        "or --speculative-draft-model-path, or a lower --mem-fraction-static.",
        link="https://github.com/zai-org/GLM-4.5/issues/3",
    ),
    Signature(
        name="out of memory in capture",
        pattern=r"OutOfMemoryError|CUDA out of memory",
        near=_CAPTURE,
        cause="The GPU's memory ran out while graphs were captured: weights and KV cache left too little.",
        cure="Lower --mem-fraction-static by 0.05, or --cuda-graph-max-bs.",
        link="https://docs.sglang.io/advanced_features/hyperparameter_tuning.html",
    ),
    Signature(
        name="out of memory: nothing left for the KV cache",
        pattern=r"Not enough memory\. Please try to increase --mem-fraction-static",
        cause="After the weights, --mem-fraction-static leaves nothing for the KV cache.",
        cure="Raise --mem-fraction-static; if other processes hold the GPU (nvidia-smi), stop them; else more GPUs.",
        link=f"{_SGLANG}/issues/6875",
    ),
    Signature(
        name="out of memory",
        pattern=r"OutOfMemoryError|CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        cause="The GPU's memory ran out.",
        cure="Look for other processes on the GPU (nvidia-smi); lower --mem-fraction-static, --chunked-prefill-size or "
        "--max-running-requests.",
        link="https://docs.sglang.io/advanced_features/hyperparameter_tuning.html",
    ),
    Signature(
        name="the GPUs have unequal free memory",
        pattern=r"RuntimeError: The memory capacity is unbalanced",
        cause="One GPU has much less free memory than another: a process of an earlier launch still holds it.",
        cure="nvidia-smi shows it; end that process, by its pid.",
        link="https://docs.sglang.io/advanced_features/hyperparameter_tuning.html",
    ),
    Signature(
        name="killed by the system",
        pattern=r"(?:[Ee]xit code: -9|terminated with -9|exit status 137|oom[-_ ]kill\w*|"
        r"Out of memory: Killed process|: line \d+: +\d+ Killed\b|^Killed$)",
        cause="A server process got SIGKILL, which SGLang's own shutdown aside means the kernel's OOM killer or the "
        "container's memory limit.",
        cure="`dmesg -T | grep -i oom` tells; raise the container's memory, lower --hicache-size, or load with fewer "
        "threads.",
        link=f"{_SGLANG}/pull/20287",
    ),
    Signature(
        name="host memory or disk is full",
        pattern=r"\[Errno 12\] Cannot allocate memory|\[Errno 28\] No space left on device|"
        r"DefaultCPUAllocator: can't allocate memory|unable to (?:write|allocate) .*shared memory",
        cause="The host ran out of memory, disk, or room in /dev/shm.",
        cure="df -h . /dev/shm ~/.cache; containers need --shm-size 32g (or --ipc host).",
        link=f"{_SGLANG}/issues/5762",
    ),
    # --- GPUs and what is between them ---
    Signature(
        name="the driver is too old",
        pattern=r"NVIDIA driver on your system is too old|CUDA driver version is insufficient|"
        r"provided PTX was compiled with an unsupported toolchain",
        cause="The NVIDIA driver is older than the CUDA that torch was built with.",
        cure="Upgrade the driver (CUDA 13 needs 580 or newer), or install the cu128 builds.",
        link="https://docs.nvidia.com/deploy/cuda-compatibility/",
    ),
    Signature(
        name="the fabric manager does not run",
        pattern=r"system not yet initialized|No accelerator \(CUDA",
        near=r"system not yet initialized",
        cause="CUDA does not start (error 802): on machines with NVSwitch it waits for NVIDIA's fabric manager.",
        cure="`systemctl status nvidia-fabricmanager` on the host: it has to run, in exactly the driver's version. "
        "Without NVSwitch the cause is not known; the report met it with driver 610.",
        link=f"{_SGLANG}/issues/27487",
    ),
    Signature(
        name="no GPU is visible",
        pattern=r"No CUDA GPUs are available|no CUDA-capable device is detected|Torch not compiled with CUDA enabled|"
        r"Found no NVIDIA driver|invalid device ordinal|No accelerator \(CUDA",
        cause="The server sees no GPU, or fewer than --tp needs.",
        cure="nvidia-smi in the same container; --gpus all; CUDA_VISIBLE_DEVICES; a CUDA build of torch.",
        link="https://docs.sglang.io/get_started/install.html",
    ),
    Signature(
        name="illegal memory access in capture",
        pattern=r"CUDA error: an illegal memory access was encountered|"
        r"CUDA_ERROR_ILLEGAL_ADDRESS|\[CUDA\]: an illegal memory access",
        near=_CAPTURE,
        cause="A kernel touched memory it must not while a graph was captured. Capturing across graph breaks "
        "(fullgraph=False, or compiler.disable in the traced code) does that.",
        cure="Undo what broke the graph, and use the breakable prefill graph: --enable-breakable-cuda-graph on "
        "0.5.11-0.5.13, --cuda-graph-backend-prefill breakable from 0.5.14. Else --disable-cuda-graph tells whether "
        "the kernel itself is at fault.",
        link=f"{_SGLANG}/issues/5029",
    ),
    Signature(
        name="illegal memory access",
        pattern=r"CUDA error: an illegal memory access was encountered|"
        r"CUDA_ERROR_ILLEGAL_ADDRESS|\[CUDA\]: an illegal memory access",
        cause="A kernel touched memory it must not; CUDA reports it late, so the frame need not be the guilty one.",
        cure="Once with CUDA_LAUNCH_BLOCKING=1 and --disable-cuda-graph the traceback names the kernel.",
        link=f"{_SGLANG}/issues/8296",
    ),
    Signature(
        name="an Xid error of the GPU",
        pattern=r"NVRM: Xid|Xid \(PCI|CUDA error: (?:uncorrectable ECC|unspecified launch failure|"
        r"hardware stack error)|GPU has fallen off the bus",
        cause="The GPU or its driver reports a fault.",
        cure="`dmesg -T | grep -i xid` gives the number; NVIDIA's table says whether it is hardware.",
        link="https://docs.nvidia.com/deploy/xid-errors/",
    ),
    Signature(
        name="one GPU cannot reach another's memory",
        pattern=r"peer access is not supported between these two devices",
        cause="Between two of the GPUs this machine allows no peer access, and something wanted it, as a rule the "
        "custom all-reduce.",
        cure="--disable-custom-all-reduce; `nvidia-smi topo -p2p r` shows which pairs allow it.",
        link=f"{_SGLANG}/issues/4814",
    ),
    Signature(
        name="NCCL cannot connect",
        pattern=r"NCCL error.*(?:unhandled system error|remote process exited|unhandled cuda error)|"
        r"ncclSystemError|ncclUnhandledCudaError|ncclInternalError|ncclInvalidUsage",
        cause="NCCL could not set up communication between the GPUs.",
        cure="NCCL_DEBUG=INFO shows the call; in containers --ipc host or --shm-size 32g; on several nodes "
        "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME; on PCIe boxes NCCL_IB_DISABLE=1, NCCL_P2P_LEVEL=PHB or SYS.",
        link="https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html",
    ),
    Signature(
        name="NCCL hangs",
        pattern=r"Watchdog caught collective operation timeout: (?P<what>WorkNCCL\([^)]*OpType=\w+)?",
        cause="A collective never ended: one rank did not come to it, or the link between GPUs stalls.",
        cure="Compare the ranks (one may have died or taken another branch: another plugin list, another version); "
        "then NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1 or --disable-custom-all-reduce, one at a time. Weights that load "
        "for longer than ten minutes want --dist-timeout 3600.",
        link=f"{_SGLANG}/issues/3784",
    ),
    Signature(
        name="a rank loads much slower",
        pattern=r"TP rank \d+ could finish the model loading, but there are other ranks that didn't finish loading",
        cause="One rank loaded its weights, and others did not within the time: they failed, or the disk is slow.",
        cure="Look at the other ranks' lines first; else --dist-timeout 3600, and weights on a local disk.",
        link=f"{_SGLANG}/issues/4503",
    ),
    Signature(
        name="a batch took longer than the watchdog allows",
        pattern=r"[Ww]atchdog timeout \(self\.watchdog_timeout=(?P<seconds>[\d.]+)",
        cause="One step took longer than {seconds} s: a kernel was built in the middle of serving, or a rank hangs.",
        cure="Warm up (GLM5_PLUGINS=fp4_warmup), --watchdog-timeout 1800 for the first start; if it happens again, "
        "py-spy dump on every scheduler shows who waits for whom.",
        link=f"{_SGLANG}/issues/33393",
    ),
    Signature(
        name="sizes do not divide",
        pattern=r"(?:AssertionError|ValueError|RuntimeError): "
        r"(?P<what>.*\b(?:not divisible by|must be divisible by|must be 1 or the same as the tensor parallel)\b.*)",
        cause="The parallel sizes do not fit the model or each other: {what}",
        cure="Choose --tp, --ep and --dp so that they divide heads, experts and each other; with --moe-runner-backend "
        "flashinfer_cutlass or flashinfer_cutedsl --ep is 1 or as --tp.",
        link="https://docs.sglang.io/advanced_features/server_arguments.html",
    ),
    Signature(
        name="crashed in native code",
        pattern=r"Fatal Python error: (?P<what>[\w ]+)|^Segmentation fault|^Bus error|"
        r": line \d+: +\d+ (?P<signal>Segmentation fault|Bus error|Illegal instruction|Aborted)\b|"
        r"terminate called after throwing an instance of '(?P<type>[^']+)'",
        cause="A process crashed in compiled code ({what}{signal}{type}).",
        cure="The stack that Python prints names the module (PYTHONFAULTHANDLER=1 where there is none); check that its "
        "version is the one that SGLang pins.",
        link="https://docs.python.org/3/library/faulthandler.html",
        general=True,
    ),
    # --- what follows from a failure elsewhere ---
    Signature(
        name="a child process died",
        pattern=r"Received sigquit from a child process|scheduler died during initialization|scheduler is dead|"
        r"Scheduler or DataParallelController \d+ terminated with",
        cause="A child process failed; why stands in that process's own lines.",
        cure="Look further up, or in the log of the node or container where that process ran.",
        link="",
        symptom=True,
    ),
    Signature(
        name="another rank went away",
        pattern=r"Connection (?:closed|reset) by (?:remote )?peer|Socket Timeout|Broken pipe|"
        r"EOFError|DistNetworkError|store->get\(|TCPStore",
        cause="Another process closed the connection; it failed first.",
        cure="Look into the log of the other ranks and nodes.",
        link="",
        symptom=True,
    ),
)
