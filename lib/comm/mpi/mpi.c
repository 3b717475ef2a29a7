/* SPDX-License-Identifier: Apache-2.0 */
/* mpi.c -- the module of Open MPI: wire.h over its messages without waiting.
 *
 * MPI is asked for MPI_THREAD_SERIALIZED and called under one lock: no call of this file waits, so the lock is held for moments,
 * and MPI needs no locks of its own.  Errors are returned, never MPI's own end of the job.  Collective calls of MPI are not used:
 * their order of summation is not fixed, and they cannot be left when a rank is missing. */
#include <mpi.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "comm/wire.h"

/* Counts are int: a power of two below. */
#define MOST ((size_t)1 << 30)

_Static_assert(sizeof(MPI_Request) <= sizeof(uintptr_t), "a request fits into a number");

static struct {
    lm_wire wire;
    MPI_Comm comm;
    pthread_mutex_t lock;
    bool stopped; /* MPI moves data only inside its calls: it is no longer called */
    char version[MPI_MAX_LIBRARY_VERSION_STRING];
} mpi = { .lock = PTHREAD_MUTEX_INITIALIZER };

static lm_code check(int rc, const char *call, lm_err *e)
{
    char text[MPI_MAX_ERROR_STRING] = "";
    int n = 0;

    if (rc == MPI_SUCCESS)
        return LM_OK;
    MPI_Error_string(rc, text, &n);
    return lm_fail(e, LM_EIO, call, NULL, "%s", text);
}

/* Take the lock, unless MPI must no longer be called. */
static lm_code enter(lm_err *e)
{
    pthread_mutex_lock(&mpi.lock);
    if (!mpi.stopped)
        return LM_OK;
    pthread_mutex_unlock(&mpi.lock);
    return lm_fail(e, LM_EIO, "messages", NULL, "have been stopped");
}

static uintptr_t pack(MPI_Request r)
{
    uintptr_t v = 0;

    memcpy(&v, &r, sizeof r);
    return v;
}

static MPI_Request unpack(uintptr_t v)
{
    MPI_Request r;

    memcpy(&r, &v, sizeof r);
    return r;
}

static lm_code mpi_send(lm_wire *w, int to, int tag, const void *data, size_t bytes, bool taken,
                        uintptr_t *request, lm_err *e)
{
    MPI_Request r = MPI_REQUEST_NULL;
    int rc;

    (void)w;
    if (enter(e))
        return e->code;
    rc = taken ? MPI_Issend(data, (int)bytes, MPI_BYTE, to, tag, mpi.comm, &r)
               : MPI_Isend(data, (int)bytes, MPI_BYTE, to, tag, mpi.comm, &r);
    pthread_mutex_unlock(&mpi.lock);
    *request = pack(r);
    return check(rc, "MPI_Isend", e);
}

static lm_code mpi_recv(lm_wire *w, int from, int tag, void *data, size_t bytes, uintptr_t *request,
                        lm_err *e)
{
    MPI_Request r = MPI_REQUEST_NULL;
    int rc;

    (void)w;
    if (enter(e))
        return e->code;
    rc = MPI_Irecv(data, (int)bytes, MPI_BYTE, from, tag, mpi.comm, &r);
    pthread_mutex_unlock(&mpi.lock);
    *request = pack(r);
    return check(rc, "MPI_Irecv", e);
}

/* One request after the other: an array of MPI's would have to be made for each call. */
static lm_code mpi_test(lm_wire *w, uintptr_t *requests, int n, int *at, size_t *got, lm_err *e)
{
    int rc = MPI_SUCCESS, done = 0, count = 0, class = MPI_SUCCESS;
    MPI_Status status;

    (void)w;
    *at = -1;
    if (enter(e))
        return e->code;
    for (int i = 0; i < n && !done && rc == MPI_SUCCESS; i++) {
        MPI_Request r = unpack(requests[i]);

        if (!requests[i])
            continue;
        rc = MPI_Test(&r, &done, &status);
        if (rc != MPI_SUCCESS)
            MPI_Error_class(rc, &class);
        if (class == MPI_ERR_TRUNCATE)
            rc = MPI_SUCCESS, done = 1;
        if (done || rc != MPI_SUCCESS)
            *at = i, requests[i] = 0;
    }
    if (done && class == MPI_SUCCESS)
        MPI_Get_count(&status, MPI_BYTE, &count);
    pthread_mutex_unlock(&mpi.lock);
    *got = class == MPI_ERR_TRUNCATE ? MOST + 1 : (size_t)count;
    return check(rc, "MPI_Test", e);
}

static lm_code mpi_poll(lm_wire *w, int tag, void *data, size_t bytes, bool *there, lm_err *e)
{
    MPI_Message m;
    MPI_Status status;
    int found = 0, rc;

    (void)w;
    if (enter(e))
        return e->code;
    rc = MPI_Improbe(MPI_ANY_SOURCE, tag, mpi.comm, &found, &m, &status);
    if (rc == MPI_SUCCESS && found)
        rc = MPI_Mrecv(data, (int)bytes, MPI_BYTE, &m, MPI_STATUS_IGNORE);
    pthread_mutex_unlock(&mpi.lock);
    *there = found && rc == MPI_SUCCESS;
    return check(rc, "MPI_Improbe", e);
}

static void mpi_stop(lm_wire *w)
{
    (void)w;
    pthread_mutex_lock(&mpi.lock);
    mpi.stopped = true;
    pthread_mutex_unlock(&mpi.lock);
}

/* After a failure MPI is left as it is: MPI_Finalize would wait for the missing.  The launcher ends the others when this process
 * ends with a status that is not 0. */
static void mpi_close(lm_wire *w, bool failed)
{
    (void)w;
    if (failed)
        return;
    MPI_Comm_free(&mpi.comm);
    MPI_Finalize();
}

static lm_code open_mpi(lm_wire **out, lm_err *e)
{
    int given = 0, *most = NULL, found = 0, n = 0, rank = 0, size = 0;

    if (check(MPI_Init_thread(NULL, NULL, MPI_THREAD_SERIALIZED, &given), "MPI_Init_thread", e))
        return e->code;
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    if (given < MPI_THREAD_SERIALIZED)
        return lm_fail(e, LM_EIO, "MPI_Init_thread", NULL, "this MPI cannot be called by threads");
    if (check(MPI_Comm_dup(MPI_COMM_WORLD, &mpi.comm), "MPI_Comm_dup", e))
        return e->code;
    MPI_Comm_set_errhandler(mpi.comm, MPI_ERRORS_RETURN);
    MPI_Comm_rank(mpi.comm, &rank);
    MPI_Comm_size(mpi.comm, &size);
    MPI_Comm_get_attr(mpi.comm, MPI_TAG_UB, &most, &found);
    MPI_Get_library_version(mpi.version, &n);
    mpi.version[strcspn(mpi.version, ",\n")] = 0;
    mpi.wire = (lm_wire){ .rank = rank,
                          .size = size,
                          .tags = found && most ? *most : 32767,
                          .most = MOST,
                          .name = mpi.version,
                          .send = mpi_send,
                          .recv = mpi_recv,
                          .test = mpi_test,
                          .poll = mpi_poll,
                          .stop = mpi_stop,
                          .close = mpi_close };
    *out = &mpi.wire;
    return LM_OK;
}

extern __attribute__((visibility("default"))) const lm_wire_module lm_module_mpi;
const lm_wire_module lm_module_mpi = {
    .head = { .version = LM_VERSION, .size = sizeof(lm_wire), .contracts = LM_CONTRACTS },
    .open = open_mpi,
};
