/* A FAKE of NVIDIA's management library, for tests without a GPU: answers from a text file that tests rewrite.

   FAKE_NVML names the file. Its lines are `<gpu> <field> <value>`; gpu -1 is the library itself.
   What it has no line for is not supported (3). `<gpu> error <n>`: every call about that gpu gives n.
   Signatures are those of nvml.h; -DOLD leaves out what drivers before 510 lack. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NOT_FOUND 6
#define NOT_SUPPORTED 3
#define INVALID 2

static int look(long gpu, const char *field, char *value) {
    char line[256], name[64];
    long of;
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "/dev/null", "r");
    int found = 0;
    if (!file) return 0;
    while (!found && fgets(line, sizeof line, file))
        found = sscanf(line, "%ld %63s %127s", &of, name, value) == 3 && of == gpu && !strcmp(name, field);
    fclose(file);
    return found;
}

static int number(long gpu, const char *field, unsigned long long *out) {
    char value[128];
    if (gpu >= 0 && look(gpu, "error", value)) return atoi(value);
    if (!look(gpu, field, value)) return NOT_SUPPORTED;
    *out = strtoull(value, NULL, 10);
    return 0;
}

static long gpu_of(void *handle) { return (long)handle - 1; }

int nvmlInit_v2(void) {
    char value[128];
    if (look(-1, "hang", value)) sleep(atoi(value)); /* seconds, as a GPU that is off the bus may */
    return look(-1, "init", value) ? atoi(value) : 0;
}

int nvmlShutdown(void) { return 0; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    unsigned long long n = 0;
    int rc = number(-1, "count", &n);
    *count = (unsigned)n;
    return rc;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    unsigned long long n = 0;
    number(-1, "count", &n);
    *handle = (void *)(long)(index + 1);
    return index < n ? 0 : INVALID;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    char value[128];
    for (long gpu = 0; gpu < 64; gpu++)
        if (look(gpu, "uuid", value) && !strcmp(value, uuid)) {
            *handle = (void *)(gpu + 1);
            return 0;
        }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
    char value[128];
    if (!look(gpu_of(handle), "uuid", value)) return NOT_SUPPORTED;
    strncpy(uuid, value, length);
    return 0;
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    unsigned long long n = 0;
    int rc = number(gpu_of(handle), "mig", &n);
    *current = *pending = (unsigned)n;
    return rc;
}

struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(void *handle, struct utilization *out) {
    unsigned long long n = 0;
    int rc = number(gpu_of(handle), "utilization", &n);
    if (!rc) out->gpu = (unsigned)n;
    return rc;
}

struct memory { unsigned long long total, free, used; };
int nvmlDeviceGetMemoryInfo(void *handle, struct memory *out) {
    int rc = number(gpu_of(handle), "total", &out->total);
    return rc ? rc : number(gpu_of(handle), "used", &out->used);
}

#ifndef OLD
struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *handle, struct memory_v2 *out) {
    if (out->version != (sizeof *out | 2u << 24)) return 25; /* ARGUMENT_VERSION_MISMATCH */
    int rc = number(gpu_of(handle), "total", &out->total);
    return rc ? rc : number(gpu_of(handle), "used", &out->used);
}
#endif

int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) {
    unsigned long long n = 0;
    int rc = number(gpu_of(handle), "power", &n);
    *milliwatts = (unsigned)n;
    return rc;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *celsius) {
    unsigned long long n = 0;
    int rc = sensor ? INVALID : number(gpu_of(handle), "temperature", &n);
    *celsius = (unsigned)n;
    return rc;
}
