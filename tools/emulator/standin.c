/* The CUDA entry points that an exported object calls, for a machine without a driver: each launch
   is handed to a callback. Linked into the object with -Bsymbolic, so that the object finds these
   before those of the DSL's runtime. */
#include <stddef.h>
#include <stdint.h>

enum { CLUSTER = 4, DEPENDENT = 6 };       /* cudaLaunchAttributeID */
enum { OPTIN_SHARED_BYTES = 97 };          /* cudaDevAttrMaxSharedMemoryPerBlockOptin */

typedef struct { uint32_t x, y, z; } dim3;
typedef struct { uint32_t id, pad; union { uint32_t words[16]; } value; } attribute;
typedef struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
    attribute *attributes;
    uint32_t num_attributes;
} launch_config;

typedef void (*launch_fn)(const char *name, const uint32_t shape[9], uint64_t shared_bytes,
                          uint32_t dependent, void **args);
static launch_fn on_launch;

void moe_ep_jit_on_launch(launch_fn callback) { on_launch = callback; }

int _cudaLibraryLoadData(void **library) { *library = (void *)1; return 0; }
int _cudaLibraryGetKernel(const char **kernel, void *library, const char *name) {
    static char names[1 << 16];
    static size_t used;
    size_t i = 0, at = used;
    (void)library;
    /* The caller's text lives on its stack; kernels are known by a copy of their name. */
    for (; name[i]; i++) {
        if (at + i + 1 >= sizeof names) return 2;
        names[at + i] = name[i];
    }
    names[at + i] = 0;
    used = at + i + 1;
    *kernel = names + at;
    return 0;
}
int _cuKernelGetAttribute(int *value) { *value = 0; return 0; }
int _cudaFuncSetAttribute(void) { return 0; }
int _cudaKernelSetAttributeForDevice(void) { return 0; }
int _cudaGetDevice(int *device) { *device = 0; return 0; }
int _cudaSetDevice(int device) { return device; }
int _cudaDeviceGetAttribute(int *value, int which) {
    *value = which == OPTIN_SHARED_BYTES ? 232448 : 0;
    return 0;
}

int _cudaLaunchKernelEx(const launch_config *config, const char *name, void **args) {
    uint32_t shape[9] = {config->grid.x,  config->grid.y,  config->grid.z,
                         config->block.x, config->block.y, config->block.z, 1, 1, 1};
    uint32_t dependent = 0;
    for (uint32_t i = 0; i < config->num_attributes; i++) {
        const attribute *a = config->attributes + i;
        if (a->id == DEPENDENT) dependent = a->value.words[0];
        if (a->id == CLUSTER)
            for (int axis = 0; axis < 3; axis++) shape[6 + axis] = a->value.words[axis];
    }
    if (!on_launch) return 3;
    on_launch(name, shape, config->shared_bytes, dependent, args);
    return 0;
}

int cuda_dialect_init_library_once(void **slot, int (*load)(void **), int (*prepare)(void **, int)) {
    if (*slot) return 0;
    void *library = NULL;
    int error = load(&library);
    if (!error && prepare) error = prepare(&library, 0);
    if (!error) *slot = library;
    return error;
}
void cuda_dialect_unload_library_once(void **slot) { *slot = NULL; }
void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int), int code) {
    const char *text[] = {"the launch stand-in of the emulator failed"};
    (void)code;
    if (raise) raise("RuntimeError", text, 1);
}
