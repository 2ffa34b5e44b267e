// The stand-in of libnvrtc: a C compiler makes a library of plain functions of what NVRTC would make
// PTX of, so only what C and CUDA C++ have in common compiles.
//
// The text that it gives for PTX names that library (`modules.c` reads it). As in C++ a kernel that
// is not `extern "C"` cannot be found by its name. What was compiled once is kept in the folder of
// the library.

#define _GNU_SOURCE
#include "standin.h"

#include <ctype.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NVRTC_SUCCESS = 0, NVRTC_ERROR_INVALID_INPUT = 3, NVRTC_ERROR_INVALID_PROGRAM = 4,
       NVRTC_ERROR_INVALID_OPTION = 5, NVRTC_ERROR_COMPILATION = 6 };

typedef struct { char *source, *name, *log, *ptx; int real; } Program;

// Before the source: what CUDA C++ knows without a header, as far as our kernels use it.
static const char PREFIX[] =
    "#define __global__\n#define __device__\n#define __host__\n"
    "#define STANDIN_C\n"
    "static __thread struct { unsigned x, y, z; } threadIdx, blockIdx, blockDim, gridDim;\n"
    "double exp(double), tanh(double), fabs(double), fmax(double, double), fmin(double, double);\n"
    "double sqrt(double), log(double), fma(double, double, double);\n"
    "float expf(float), tanhf(float), fabsf(float), fmaxf(float, float), fminf(float, float);\n"
    "float sqrtf(float), logf(float), fmaf(float, float, float);\n"
    "static inline unsigned atomicAdd(unsigned *to, unsigned x) { unsigned held = *to; *to += x; return held; }\n";

// What machine code begins with here.
static const char CODE[] = "\177ELF stand-in\n";

static const int TARGETS[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121, 0};

EXPORT int nvrtcGetNumSupportedArchs(int *count) {
    CALL("nvrtcGetNumSupportedArchs");
    *count = (int)(sizeof TARGETS / sizeof *TARGETS) - 1;
    done(NVRTC_SUCCESS);
}

EXPORT int nvrtcGetSupportedArchs(int *to) {
    CALL("nvrtcGetSupportedArchs");
    memcpy(to, TARGETS, sizeof TARGETS - sizeof *TARGETS);
    done(NVRTC_SUCCESS);
}

EXPORT const char *nvrtcGetErrorString(int result) { return result ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }

EXPORT int nvrtcCreateProgram(Program **to, const char *source, const char *name, int headers,
                              const char *const *texts, const char *const *names) {
    CALL("nvrtcCreateProgram");
    if (!source || headers || texts || names) done(refuse(NVRTC_ERROR_INVALID_INPUT, "a program without source"));
    Program *program = calloc(1, sizeof *program);
    program->source = strdup(source);
    program->name = strdup(name ? name : "default_program");
    program->log = strdup("");
    *to = program;
    done(NVRTC_SUCCESS);
}

EXPORT int nvrtcDestroyProgram(Program **program) {
    CALL("nvrtcDestroyProgram");
    if (!program || !*program) done(refuse(NVRTC_ERROR_INVALID_PROGRAM, "no program is destroyed"));
    free((*program)->source);
    free((*program)->name);
    free((*program)->log);
    free((*program)->ptx);
    free(*program);
    *program = NULL;
    done(NVRTC_SUCCESS);
}

// What the options say; the number of the target, or 0 for one that is not documented.
static int target_of(int count, const char *const *options, int *fmad, int *real, const char **wrong) {
    int target = 75;
    *fmad = 1;
    *real = 0;
    for (int i = 0; i < count; i++) {
        static const char *const flags[] = {"--ftz=", "--prec-div=", "--prec-sqrt=", "--fmad="};
        const char *option = *wrong = options[i], *include = "--include-path=", *of = "--gpu-architecture=";
        int known = 0;
        for (int flag = 0; flag < 4; flag++) {
            size_t length = strlen(flags[flag]);
            if (strncmp(option, flags[flag], length)) continue;
            known = !strcmp(option + length, "true") || !strcmp(option + length, "false");
            if (flag == 3) *fmad = !strcmp(option + length, "true");
        }
        if (!strncmp(option, include, strlen(include))) known = option[strlen(include)] != 0;
        if (!strncmp(option, of, strlen(of))) {
            const char *name = option + strlen(of);
            *real = !strncmp(name, "sm_", 3);
            target = *real ? atoi(name + 3) : !strncmp(name, "compute_", 8) ? atoi(name + 8) : 0;
            for (const int *one = TARGETS; *one; one++) known |= *one == target;
        }
        if (!known) return 0;
    }
    return target;
}

// Runs a program, and gives what it says to a file; whether it ended well.
static int ran(char *const *arguments, const char *said) {
    pid_t child = fork();
    if (child == 0) {
        int to = open(said, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(to, 2);
        unsetenv("LD_LIBRARY_PATH");
        execvp(arguments[0], arguments);
        _exit(127);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static char *read_all(const char *path) {
    FILE *from = fopen(path, "rb");
    if (!from) return strdup("");
    char *text = NULL;
    size_t length = 0, room = 0;
    for (;;) {
        if (room - length < 65536) text = realloc(text, (room = room * 2 + 131072));
        size_t got = fread(text + length, 1, room - length - 1, from);
        length += got;
        if (!got) break;
    }
    fclose(from);
    text[length] = 0;
    return text;
}

// `extern "C"` becomes a word that C lets stand.
static char *in_c(const char *source) {
    char *text = malloc(strlen(source) + 1), *to = text;
    while (*source) {
        if (!strncmp(source, "extern \"C\"", 10)) {
            memcpy(to, "STANDIN_C ", 10);
            to += 10;
            source += 10;
        } else {
            *to++ = *source++;
        }
    }
    *to = 0;
    return text;
}

static const char *word(const char *at, const char *wanted) {
    while (isspace((unsigned char)*at)) at++;
    size_t length = strlen(wanted);
    return strncmp(at, wanted, length) ? NULL : at + length;
}

// What calls a kernel for each thread, from a list of its arguments "const Args a, int n".
static void write_caller(FILE *to, const char *name, int length, const char *list) {
    char *arguments = strdup(list), *rest = arguments, *calls[64];
    int count = 0;
    fprintf(to, "\nstruct standin_of_%.*s {", length, name);
    for (char *one; (one = strsep(&rest, ",")) && count < 64;) {
        char *end = one + strlen(one);
        while (end > one && isspace((unsigned char)end[-1])) *--end = 0;
        if (!*one || !strcmp(one, "void")) continue;
        char *begin = end;
        while (begin > one && (isalnum((unsigned char)begin[-1]) || begin[-1] == '_')) begin--;
        fprintf(to, " %s;", one);
        calls[count++] = begin;
    }
    const char *shown = "__attribute__((visibility(\"default\")))";
    fprintf(to, " };\n%s const unsigned standin_sizes_%.*s[] = {", shown, length, name);
    for (int i = 0; i < count; i++)
        fprintf(to, " sizeof(((struct standin_of_%.*s *)0)->%s),", length, name, calls[i]);
    fprintf(to, " 0 };\n%s void standin_run_%.*s(void **a, const unsigned *g, const unsigned *b) {\n"
            "    (void)a;\n"
            "    gridDim.x = g[0], gridDim.y = g[1], gridDim.z = g[2];\n"
            "    blockDim.x = b[0], blockDim.y = b[1], blockDim.z = b[2];\n"
            "    for (blockIdx.z = 0; blockIdx.z < g[2]; blockIdx.z++)\n"
            "    for (blockIdx.y = 0; blockIdx.y < g[1]; blockIdx.y++)\n"
            "    for (blockIdx.x = 0; blockIdx.x < g[0]; blockIdx.x++)\n"
            "    for (threadIdx.z = 0; threadIdx.z < b[2]; threadIdx.z++)\n"
            "    for (threadIdx.y = 0; threadIdx.y < b[1]; threadIdx.y++)\n"
            "    for (threadIdx.x = 0; threadIdx.x < b[0]; threadIdx.x++)\n"
            "        %.*s(", shown, length, name, length, name);
    for (int i = 0; i < count; i++)
        fprintf(to, "%s*(__typeof__(((struct standin_of_%.*s *)0)->%s) *)a[%d]", i ? ", " : "", length, name,
                calls[i], i);
    fprintf(to, ");\n}\n");
    free(arguments);
}

// The kernels that can be found by their names: to the library's source, and as entries to the text.
static void write_kernels(const char *preprocessed, FILE *source, FILE *text) {
    for (const char *at = preprocessed; (at = strstr(at, "STANDIN_C"));) {
        at += strlen("STANDIN_C");
        const char *global = word(at, "__global__"), *name = global ? word(global, "void") : NULL;
        if (!name) continue;
        while (isspace((unsigned char)*name)) name++;
        const char *open = strchr(name, '('), *close = open ? strchr(open, ')') : NULL;
        if (!close) continue;
        char *list = strndup(open + 1, (size_t)(close - open - 1));
        int length = (int)(open - name);
        write_caller(source, name, length, list);
        fprintf(text, "\n.visible .entry %.*s(\n", length, name);
        free(list);
        at = close;
    }
}

static uint64_t hash(uint64_t state, const char *text) {
    for (; *text; text++) state = (state ^ (unsigned char)*text) * 0x100000001b3ull;
    return state * 31;
}

static int compile(Program *program, int target, int fmad) {
    Dl_info here;
    dladdr((void *)compile, &here);
    char stem[1024], named[8][1200];
    uint64_t key = hash(hash(hash(target * 2 + fmad + 7, program->source), program->name), PREFIX);
    snprintf(stem, sizeof stem, "%.*s/%016llx", (int)(strrchr(here.dli_fname, '/') - here.dli_fname),
             here.dli_fname, (unsigned long long)key);
    const char *const ends[] = {".so", ".ptx", ".E", ".c", ".said", ".so.new", ".ptx.new"};
    for (int i = 0; i < 7; i++) {
        // Of what is made on the way each process has its own.
        if (i < 2) snprintf(named[i], sizeof named[i], "%s%s", stem, ends[i]);
        else snprintf(named[i], sizeof named[i], "%s.%d%s", stem, (int)getpid(), ends[i]);
    }
    free(program->ptx);
    program->ptx = NULL;
    if (access(named[1], R_OK) == 0) {
        program->ptx = read_all(named[1]);
        return NVRTC_SUCCESS;
    }
    char *text = in_c(program->source), arch[64];
    snprintf(arch, sizeof arch, "-D__CUDA_ARCH__=%d0", target);
    FILE *source = fopen(named[3], "w");
    fprintf(source, "%s", text);
    fclose(source);
    char *const preprocess[] = {"cc", "-E", "-P", "-x", "c", "-std=gnu11", "-Wno-builtin-macro-redefined",
                                "-D__CUDACC_RTC__", "-D__cplusplus=201703L", arch, named[3], "-o", named[2], NULL};
    int good = ran(preprocess, named[4]);
    if (good) {
        char *preprocessed = read_all(named[2]);
        source = fopen(named[3], "w");
        FILE *ptx = fopen(named[6], "w");
        fprintf(source, "%s#line 1 \"%s\"\n%s", PREFIX, program->name, text);
        fprintf(ptx, "//\n// Generated by the stand-in of NVRTC, for tests\n//\n// library %s\n.version 9.0\n"
                ".target sm_%d\n.address_size 64\n", named[0], target);
        write_kernels(preprocessed, source, ptx);
        fclose(source);
        fclose(ptx);
        free(preprocessed);
        char *const build[] = {"cc", "-x", "c", "-std=gnu11", "-O2", "-w", "-shared", "-fPIC", "-fvisibility=hidden",
                               fmad ? "-ffp-contract=fast" : "-ffp-contract=off", "-D__CUDACC_RTC__",
                               "-D__cplusplus=201703L", arch, named[3], "-lm", "-o", named[5], NULL};
        good = ran(build, named[4]);
    }
    free(program->log);
    program->log = read_all(named[4]);
    if (good && rename(named[5], named[0]) == 0 && rename(named[6], named[1]) == 0) program->ptx = read_all(named[1]);
    for (int i = 2; i < 7; i++) unlink(named[i]);
    free(text);
    return program->ptx ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}

EXPORT int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    CALL("nvrtcCompileProgram");
    if (!program) done(refuse(NVRTC_ERROR_INVALID_PROGRAM, "no program is compiled"));
    int fmad = 0;
    const char *wrong = "";
    int target = target_of(count, options, &fmad, &program->real, &wrong);
    if (!target) {
        free(program->log);
        if (asprintf(&program->log, "nvrtc: error: invalid value for an option: %s\n", wrong) < 0) abort();
        done(refuse(NVRTC_ERROR_INVALID_OPTION, "NVRTC's option %s", wrong));
    }
    done(compile(program, target, fmad));
}

EXPORT int nvrtcGetPTXSize(Program *program, size_t *size) {
    CALL("nvrtcGetPTXSize");
    if (!program || !program->ptx) done(refuse(NVRTC_ERROR_INVALID_PROGRAM, "PTX of what was not compiled"));
    *size = strlen(program->ptx) + 1;
    done(NVRTC_SUCCESS);
}

EXPORT int nvrtcGetPTX(Program *program, char *to) {
    CALL("nvrtcGetPTX");
    if (!program || !program->ptx) done(refuse(NVRTC_ERROR_INVALID_PROGRAM, "PTX of what was not compiled"));
    strcpy(to, program->ptx);
    done(NVRTC_SUCCESS);
}

// There is machine code where the target was a GPU: here the same text, said to be an exact match.
EXPORT int nvrtcGetCUBINSize(Program *program, size_t *size) {
    CALL("nvrtcGetCUBINSize");
    if (!program || !program->ptx) done(refuse(NVRTC_ERROR_INVALID_PROGRAM, "code of what was not compiled"));
    *size = program->real ? strlen(program->ptx) + sizeof CODE : 0;
    done(NVRTC_SUCCESS);
}

EXPORT int nvrtcGetCUBIN(Program *program, char *to) {
    CALL("nvrtcGetCUBIN");
    if (!program || !program->ptx || !program->real)
        done(refuse(NVRTC_ERROR_INVALID_PROGRAM, "code of what was compiled to PTX"));
    strcpy(stpcpy(to, CODE), program->ptx);
    done(NVRTC_SUCCESS);
}

EXPORT int nvrtcGetProgramLogSize(Program *program, size_t *size) {
    CALL("nvrtcGetProgramLogSize");
    *size = strlen(program->log) + 1;
    done(NVRTC_SUCCESS);
}

EXPORT int nvrtcGetProgramLog(Program *program, char *to) {
    CALL("nvrtcGetProgramLog");
    strcpy(to, program->log);
    done(NVRTC_SUCCESS);
}
