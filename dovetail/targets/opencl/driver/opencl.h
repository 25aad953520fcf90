/* A network's layers on an OpenCL device. The device has a copy of the network's memory: what the host wrote is
   brought to it before a kernel reads it, and back before the host does.

   An error ends the program with status 1, after a message on stderr that names the call, the layer and the code. */
#ifndef OPENCL_H
#define OPENCL_H

#include <stddef.h>
#include <stdint.h>

#include "dovetail_rt.h"
#include "opencl_api.h"

/* What is computed now, for messages: the function a layer is. */
extern const char *dovetail_layer;
extern uint32_t dovetail_layer_index;
#undef DOVETAIL_MARK
#define DOVETAIL_MARK(index) (dovetail_layer = __func__, dovetail_layer_index = (uint32_t)(index))

/* Null, or an element for each layer, set before the first inference: the nanoseconds that the device took for the
   layer's kernels are added there, at the latest when a result is brought back. */
extern uint64_t *dovetail_nanoseconds;

/* Constants of a layer; they stay on the device from the first inference on. */
typedef struct {
    const uint8_t *host;
    cl_mem device;
} opencl_constants;

/* A program that a vendor supplies compiled. */
typedef struct {
    const char *file; /* for messages */
    const unsigned char *bytes;
    size_t size;
    cl_program program;
} opencl_binary;

/* What the device is given once. */
typedef struct {
    uint8_t *memory; /* of the network's values, on the host */
    size_t bytes;
    const char **source; /* OpenCL C, line by line */
    uint32_t lines;
    opencl_constants *constants; /* room for as many as there are layers */
} opencl_network;

typedef struct {
    const char *name;
    opencl_binary *binary; /* null for a kernel of the network's source */
    cl_kernel handle;
    uint32_t arguments; /* set so far */
} opencl_kernel;

/* Finds the device and makes it ready, the first time it is called. Environment variables: DOVETAIL_OPENCL is the
   library to load ("libOpenCL.so.1" if unset), DOVETAIL_OPENCL_DEVICE a part of the name of the device to take (the
   first if unset). To link with the library instead, define DOVETAIL_OPENCL_LINKED:
       make DEFINES='-DDOVETAIL_HOST -DDOVETAIL_OPENCL_LINKED' LIBRARIES=-lOpenCL */
void opencl_open(const opencl_network *network);

/* Brings bytes the host wrote to the device. */
void opencl_to_device(const uint8_t *first, uint32_t bytes);

/* Waits for the device and brings bytes its kernels wrote to the host. */
void opencl_from_device(uint8_t *first, uint32_t bytes);

/* Begins to set a kernel's arguments; those below set one each, in order. */
void opencl_begin(opencl_kernel *kernel);
void opencl_memory(opencl_kernel *kernel); /* the network's memory */
void opencl_offset(opencl_kernel *kernel, const uint8_t *first); /* a place in it, in bytes */
void opencl_part(opencl_kernel *kernel, const uint8_t *first, uint32_t bytes); /* a part of it, as a buffer */
void opencl_given(opencl_kernel *kernel, const uint8_t *constants, uint32_t bytes);
void opencl_number(opencl_kernel *kernel, int32_t number);

/* Starts it: work-items along three dimensions, and those of a work-group, null to leave that to the device. */
void opencl_run(opencl_kernel *kernel, const size_t *items, const size_t *group);

#endif
