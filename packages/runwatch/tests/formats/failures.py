"""How a training ends badly, in the words of the framework that runs it."""
# ruff: noqa: E501  (lines of logs are as long as the programs write them)

from .simulation import Log, Run

MEMORY = {
    "torch": """
        Traceback (most recent call last):
          File "/workspace/train.py", line 412, in <module>
            main()
          File "/workspace/train.py", line 287, in main
            loss.backward()
          File "/opt/conda/lib/python3.11/site-packages/torch/_tensor.py", line 648, in backward
            torch.autograd.backward(
          File "/opt/conda/lib/python3.11/site-packages/torch/autograd/__init__.py", line 353, in backward
            _engine_run_backward(
        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.19 GiB is free. Process 41 has 77.95 GiB memory in use. Of the allocated memory 70.61 GiB is allocated by PyTorch, and 5.44 GiB is reserved by PyTorch but unallocated.
    """,
    "old_torch": """
        Traceback (most recent call last):
          File "train.py", line 131, in <module>
            main()
          File "train.py", line 98, in main
            output = model(input)
        RuntimeError: CUDA out of memory. Tried to allocate 128.00 MiB (GPU 0; 10.76 GiB total capacity; 9.63 GiB already allocated; 61.56 MiB free; 9.83 GiB reserved in total by PyTorch)
    """,
    "jax": """
        Traceback (most recent call last):
          File "/workspace/train.py", line 733, in train
            state, metrics = p_train_step(state, example_batch, nextrng)
        jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 17179869184 bytes.
    """,
    "tensorflow": """
        2026-03-02 10:42:13.771932: W tensorflow/core/common_runtime/bfc_allocator.cc:497] Allocator (GPU_0_bfc) ran out of memory trying to allocate 1.56GiB (rounded to 1677721600)requested by op StatefulPartitionedCall
        Traceback (most recent call last):
          File "/workspace/fit.py", line 61, in <module>
            model.fit(train, validation_data=valid, epochs=50)
        tensorflow.python.framework.errors_impl.ResourceExhaustedError: Graph execution error: OOM when allocating tensor with shape[64,128,112,112] and type float on /job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc
    """,
    "paddle": """
        Traceback (most recent call last):
          File "tools/train.py", line 227, in <module>
            main(config, device, logger, vdl_writer, seed)
        MemoryError:

        --------------------------------------
        C++ Traceback (most recent call last):
        --------------------------------------
        Error Message Summary:
        ----------------------
        ResourceExhaustedError:

        Out of memory error on GPU 0. Cannot allocate 1.406250GB memory on GPU 0, 10.472656GB memory has been allocated and available memory is only 531.312500MB.
    """,
    "boosting": """
        Traceback (most recent call last):
          File "/workspace/fit.py", line 44, in <module>
            booster.update(train, iteration)
        MemoryError: std::bad_alloc: cudaErrorMemoryAllocation: out of memory
    """,
    "plain": """
        Traceback (most recent call last):
          File "/workspace/fit.py", line 44, in <module>
            model.fit(features, targets)
        numpy.core._exceptions._ArrayMemoryError: Unable to allocate 14.9 GiB for an array with shape (2000000000,) and data type float64
    """,
}
HUNG = {
    "torch": """
        [rank0]:[E302 11:14:30.604110513 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=48120, OpType=ALLREDUCE, NumelIn=25559081, NumelOut=25559081, Timeout(ms)=600000) ran for 600014 milliseconds before timing out.
        [rank0]:[E302 11:14:30.611410099 ProcessGroupNCCL.cpp:1895] [PG ID 0 PG GUID 0 Rank 0] Process group watchdog thread terminated with exception: [Rank 0] Watchdog caught collective operation timeout
        terminate called after throwing an instance of 'c10::DistBackendError'
    """,
    "slurm": """
        slurmstepd: error: *** JOB 8812437 ON node-041 CANCELLED AT 2026-03-02T22:15:09 DUE TO TIME LIMIT ***
    """,
}


def append_failure(run: Run, log: Log, errors: str) -> None:
    """What the framework prints where the scenario ends the run."""
    if run.scenario == "memory":
        log.parts.append("" if log.text.endswith("\n") else "\n")
        log.block(MEMORY[errors])
    elif run.scenario == "hung":
        log.parts.append("" if log.text.endswith("\n") else "\n")
        log.block(HUNG["torch" if errors == "torch" else "slurm"])
