/* Reads scans of a tree, one a line (pids), and writes for each whether the tree outruns its kill: '1' or '0'. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../../native/skerry.h"

int main(void)
{
    static struct sk_tree tree;
    struct sk_chase chase = { 0 };
    char line[4096];
    while (fgets(line, sizeof line, stdin) != NULL) {
        tree.count = 0;
        for (char *pid = strtok(line, " \n"); pid != NULL; pid = strtok(NULL, " \n"))
            tree.pids[tree.count++] = (pid_t)atoi(pid);
        putchar(sk_tree_outruns(&chase, &tree) ? '1' : '0');
    }
    return 0;
}
