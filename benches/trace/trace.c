// Writes when each kernel of a program began and ended, those of graphs among them: a library for CUDA_INJECTION64_PATH, by CUPTI's activity records, which leave
// kernels to overlap. README.md has the commands.

#include <cupti.h>
#include <stdio.h>
#include <stdlib.h>

static FILE *out;

static void CUPTIAPI request(uint8_t **buffer, size_t *size, size_t *most) {
    *size = 8 << 20;
    *buffer = aligned_alloc(8, *size);
    *most = 0;
}

static void CUPTIAPI complete(CUcontext context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid) {
    CUpti_Activity *record = NULL;
    while (cuptiActivityGetNextRecord(buffer, valid, &record) == CUPTI_SUCCESS) {
        if (record->kind == CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) {
            const CUpti_ActivityKernel10 *kernel = (const CUpti_ActivityKernel10 *)record;
            fprintf(out, "%llu %llu %d %u %s\n", (unsigned long long)kernel->start, (unsigned long long)kernel->end, kernel->gridX,
                    kernel->graphId, kernel->name);
        }
    }
    free(buffer);
}

static void finish(void) {
    cuptiActivityFlushAll(1);
    fclose(out);
}

int InitializeInjection(void) {
    out = fopen(getenv("TRACE_OUT"), "w");
    if (out == NULL) {
        return 0;
    }
    cuptiActivityRegisterCallbacks(request, complete);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    atexit(finish);
    return 1;
}
